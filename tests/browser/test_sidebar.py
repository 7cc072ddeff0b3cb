"""The runs sidebar over a real run: opened by keyboard, samples compared, settings copied, exported, deleted; drops."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect

from tests.browser.canvas import Canvas
from tests.browser.runs import EMPTY, demo, skip_old_vue, stop, wait_idle, with_previews
from tests.comfyui.server import Server


@pytest.mark.parametrize("renderer, theme", [("classic", "dark"), ("vue", "light")])
def test_a_run_is_opened_compared_copied_exported_and_deleted(
        canvas: Callable[..., Canvas], server: Server, renderer: str, theme: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer, theme=theme)
    run = f"shown_{renderer}"
    train = demo(page, run, 12)
    with_previews(page, 4)
    page.queue()
    try:
        page.page.get_by_text(f"{run} is finished").first.wait_for(timeout=300_000)
        page.panel(train).wait("p.state === 'Finished'")
        wait_idle(server)

        tab = page.open_tab()
        tab.locator(".runs button", has_text=run).wait_for()
        page.page.wait_for_timeout(500)
        page.screenshot(f"sidebar-{theme}")
        assert page.contrasts(".tab") == []
        tab.locator(".runs button", has_text=run).focus()
        page.page.keyboard.press("Enter")
        tab.locator(".pictures img").first.wait_for()
        assert page.page.evaluate("() => document.activeElement.shadowRoot?.activeElement?.className") == "back"
        expect(tab.locator(".state").first).to_have_text("Finished")
        expect(tab.locator(".gallery output")).to_have_text("Step 12")
        shown = tab.locator(".pictures img").first.get_attribute("src")
        tab.locator(".gallery input[type=range]").focus()
        page.page.keyboard.press("ArrowLeft")
        expect(tab.locator(".gallery output")).to_have_text("Step 8")
        expect(tab.locator(".pictures img").first).not_to_have_attribute("src", shown or "")
        _wait_loaded(tab.locator(".pictures img").first)
        page.screenshot(f"sidebar-run-{theme}")
        assert page.contrasts(".tab") == [] and page.cut_off(".tab") == []

        tab.locator(".pictures button").first.click()
        pair = tab.locator("dialog .pair output")
        expect(pair).to_have_text(["Step 4", "Step 8"])
        page.page.keyboard.press("ArrowRight")
        expect(pair).to_have_text(["Step 4", "Step 12"])
        for side in tab.locator("dialog .pair img").all():
            _wait_loaded(side)
        page.screenshot(f"sidebar-compare-{theme}")
        page.page.keyboard.press("Escape")
        expect(tab.locator("dialog")).to_have_count(0)

        for summary in tab.locator("summary").all():
            summary.click()
        for text in ("Step 12", "resolution"):
            expect(tab.locator("table", has_text=text).first).to_be_visible()
        page.page.set_viewport_size({"width": 933, "height": 600})  # a browser's zoom of 150 %
        page.page.wait_for_timeout(400)
        page.screenshot(f"sidebar-run-150-{theme}")
        assert page.cut_off(".tab") == []
        page.page.set_viewport_size({"width": 1400, "height": 900})

        _copy_settings(page, tab, run)
        _export(page, tab, server, run)
        tab.locator("button.delete").click()
        expect(tab.locator("form.ask")).to_contain_text("cannot be undone")
        tab.locator("form.ask .go").click()
        tab.locator(".tab .refresh").wait_for()
        expect(tab.locator(".runs button", has_text=run)).to_have_count(0)
        assert not (server.home / run).exists()
    finally:
        if (server.home / run).exists():
            stop(server, run)


def _wait_loaded(picture: Any) -> None:
    picture.scroll_into_view_if_needed()
    picture.evaluate("(img) => img.decode()")
    assert picture.evaluate("(img) => img.naturalWidth") > 0


def _copy_settings(page: Canvas, tab: Any, run: str) -> None:
    """Into an empty graph: the whole of it, linked; then into that, where a widget was changed."""
    page.load(EMPTY)
    tab.locator("button.copy").click()
    page.page.wait_for_function("() => window.app.canvas.graph.nodes.some((n) => n.type === 'FluxFFTTrainSteps')")
    nodes = page.nodes()
    start = next(n for n in nodes if n["type"] == "FluxFFTStart")
    assert ["run_name", run] in start["widgets"]
    prompt = page.api_prompt()
    train = next(n for n in prompt.values() if n["class_type"] == "FluxFFTTrainSteps")
    assert train["inputs"]["steps"] == 12 and prompt[train["inputs"]["run"][0]]["class_type"] == "FluxFFTStart"
    page.page.evaluate("""() => window.app.canvas.graph.nodes.find((n) => n.type === 'FluxFFTTrainSteps')
      .widgets.find((w) => w.name === 'steps').value = 99""")
    tab.locator("button.copy").click()
    page.page.wait_for_function("""() => window.app.canvas.graph.nodes.find((n) => n.type === 'FluxFFTTrainSteps')
      .widgets.find((w) => w.name === 'steps').value === 12""")
    assert len(page.nodes()) == len(nodes), "none was added where it was there"


def _export(page: Canvas, tab: Any, server: Server, run: str) -> None:
    tab.locator("button.export").click()
    tab.locator("form.ask input[name=filename]").fill(f"{run}_out")
    page.screenshot("sidebar-export")
    assert page.contrasts(".tab") == []
    for field in tab.locator("form.ask :is(input[type=text], input[type=number], select)").all():
        assert field.evaluate("(e) => getComputedStyle(e).color === getComputedStyle(e.closest('.tab')).color")
    tab.locator("form.ask input[name=filename]").fill(f"mine/{run}_out")
    page.page.keyboard.press("Enter")
    expect(tab.locator(".run > .line")).to_have_text("The export is queued.")
    file = server.base / "models" / "diffusion_models" / "mine" / f"{run}_out.safetensors"
    toast = page.toast(f"Exported {file.name}")
    toast.wait_for()
    page.screenshot("sidebar-exported")
    name = os.path.join("mine", file.name)
    expect(toast).to_contain_text(f"Load Diffusion Model lists it as {name}")
    expect(toast).to_contain_text(f"Folder: {file.parent.resolve()}")
    kind, *about = server.get("/object_info/UNETLoader")["UNETLoader"]["input"]["required"]["unet_name"]
    assert name in (kind if isinstance(kind, list) else about[0]["options"])
    expect(tab.locator(".run > .line")).not_to_have_text("The export is queued.")
    expect(tab.locator("details", has_text="Exports").locator("td").first).to_have_text(file.name)
    wait_idle(server)
    assert file.stat().st_size > 1e5
    assert all("flux_fft_" not in str(n["id"]) for n in page.nodes())


def _pictures(folder: Path) -> None:
    folder.mkdir(parents=True)
    for i in range(3):
        Image.new("RGB", (64, 64), (80 * i, 30, 90)).save(folder / f"{i}.png")
    (folder / "0.txt").write_text("a plain square")
    (folder / "notes.docx").write_bytes(b"x")


def test_a_zip_and_a_folder_that_are_dropped_become_datasets(
        canvas: Callable[..., Canvas], server: Server, tmp_path: Path) -> None:
    page = canvas()
    page.load(EMPTY)
    _pictures(tmp_path / "squares")
    page.drop(tmp_path / "squares", 700, 400)
    page.page.wait_for_function("() => window.app.canvas.graph.nodes.length === 1")
    page.toast("3 pictures and 1 caption file,").wait_for()
    page.page.wait_for_function("""() => window.app.canvas.graph.nodes[0].type === 'FluxFFTDataset'
      && window.app.canvas.graph.nodes[0].widgets.find((w) => w.name === 'folder').value === 'squares'""")
    names = sorted(p.name for p in (server.base / "input" / "squares").iterdir())
    assert names == ["0.png", "0.txt", "1.png", "2.png"]

    archive = tmp_path / "more.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (tmp_path / "squares").iterdir():
            file.write(path, f"inside/{path.name}")
    page.page.evaluate("() => window.app.canvas.graph.nodes[0].widgets.find((w) => w.name === 'folder').value = ''")
    (node,) = [n["id"] for n in page.nodes()]
    page.page.evaluate("(id) => window.app.canvas.graph.getNodeById(id).onExecuted({ text: ['what was said before'] })",
                       node)
    page.wait_said(node, "what was said before")
    page.drop(archive, 200, 600)
    page.page.wait_for_function("""() => window.app.canvas.graph.nodes[0].widgets.find((w) => w.name === 'folder').value
      === 'more'""")
    assert len(page.nodes()) == 1, "the one without a folder was set"
    assert page.said(node) == [], "that was of another folder"
    page.drop(archive, 600, 420)  # half over it
    page.page.wait_for_function("() => window.app.canvas.graph.nodes.length === 2")
    assert page.page.evaluate("""() => {
      const [a, b] = window.app.canvas.graph.nodes
      return b.pos[1] - 30 >= a.pos[1] + a.size[1] || a.pos[0] >= b.pos[0] + b.size[0]
    }"""), "it found a free place"
    page.page.evaluate("() => window.app.canvas.graph.remove(window.app.canvas.graph.nodes[1])")
    page.screenshot("dropped")
    assert len(list((server.base / "input" / "more" / "inside").iterdir())) == 4

    evil = io.BytesIO()
    with zipfile.ZipFile(evil, "w") as file:
        file.writestr("../../evil.png", b"x")
    (tmp_path / "evil.zip").write_bytes(evil.getvalue())
    page.drop(tmp_path / "evil.zip", 200, 600)
    page.page.get_by_text("were not taken").wait_for()
    assert not list(server.base.rglob("evil.png")) and len(page.nodes()) == 1
    assert [p for p in (server.base / "input").iterdir() if p.name.startswith(".")] == []
    page.problems.clear()  # the refusal is one: 400
    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps({**EMPTY, "nodes": [], "last_node_id": 77}))
    page.drop(workflow, 700, 400)
    page.page.wait_for_function("() => window.app.canvas.graph.nodes.length === 0"), "other files are the frontend's"

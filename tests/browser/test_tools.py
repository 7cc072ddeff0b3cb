"""What can be done on the panel: the chart read and zoomed into, save, sample, learning rate, let through."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.canvas import Canvas
from tests.browser.panel import Panel
from tests.browser.runs import EMPTY, MANY, demo, event, long_run, step_of, stop, wait_idle, with_previews
from tests.comfyui.server import Rejected, Server


def test_the_tools_of_the_panel(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "tools", MANY)
    with_previews(page, 0)
    page.show(train)
    panel = page.panel(train)
    page.queue()
    try:
        panel.wait("p.state === 'Training' && step > 25", 300)
        _read_the_chart(page, panel)

        panel.press("save")
        panel.wait("p.line.startsWith('Saved at step')")
        page.page.get_by_text("save point of step").first.wait_for()
        assert [e for e in server.events("tools") if e["type"] == "saved"]

        field = page.page.locator(".rate-field input")
        field.fill("2")
        field.press("Enter")
        expect(field).to_have_attribute("aria-invalid", "true")
        panel.wait("p.line.startsWith('The learning rate is a number')")
        field.fill("1.5e-4")
        field.press("Enter")
        panel.wait("p.line.includes('1.5e-4')")
        changed = event(page, "tools", "lr")
        assert changed["lr"] == pytest.approx(1.5e-4)
        panel.wait(f"step > {changed['step'] + 2}")
        rates = [e["lr"] for e in server.events("tools") if e["type"] == "step" and e["step"] > changed["step"]]
        assert rates == pytest.approx([1.5e-4] * len(rates), rel=0.05), "and it stays, on the schedule"

        nodes = len(page.nodes())
        _sample(page, panel)
        panel.wait("p.state === 'Training'")  # it went on by itself
        assert event(page, "tools", "sample")["prompt"] == "a red circle, r and q"
        assert len(page.nodes()) == nodes

        with pytest.raises(Rejected, match="stop it first"):
            server.post("/flux_fft/runs/tools/delete", {})

        # Another prompt waits: it is let through, then the run goes on.
        panel.press("through")
        panel.wait("p.line.startsWith('No other prompt')")
        graph = {"1": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
                 "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
        waiting = server.post("/prompt", {"prompt": graph})["prompt_id"]
        panel.press("through")
        deadline = time.monotonic() + 180
        while waiting not in server.get("/history"):
            assert time.monotonic() < deadline, server.tail(30)
            page.page.wait_for_timeout(100)
        before = step_of(panel.read())
        panel.wait(f"p.state === 'Training' && step > {before + 1}")

        # Resumed from the sidebar while another workflow is open.
        panel.press("pause")
        wait_idle(server)
        page.load(EMPTY)
        tab = page.open_tab()
        tab.locator(".runs button", has_text="tools").click()
        tab.locator("button.resume").click()
        tab.locator(".run[data-state=training]").wait_for()
        tab.locator(".run > .line", has_text="Queued").wait_for(state="detached")
        tab.locator("button.worker-log").click()
        tab.locator(".log-text", has_text="worker").wait_for()
        page.page.keyboard.press("Escape")
        tab.locator("button.stop").click()
        tab.locator(".run[data-state=stopped]").wait_for()
        wait_idle(server)
        steps = server.steps("tools")
        assert steps == list(range(1, len(steps) + 1)), "none was lost or made twice"
    finally:
        stop(server, "tools")


def _sample(page: Canvas, panel: Panel) -> None:
    """A picture of a typed prompt; the field offers the first preview's before, and the typed one after."""
    field = page.page.locator(".overlay textarea")
    panel.press("sample")
    expect(field).to_have_value("a red circle")
    expect(field).to_be_focused()
    page.page.keyboard.type("a red circle, r and q")  # in the place of the other; the canvas has shortcuts on keys
    expect(field).to_have_value("a red circle, r and q")
    page.page.keyboard.press("Enter")
    panel.wait("p.line.startsWith('The picture is queued')")
    page.page.locator(".overlay img").wait_for()
    panel.wait("!p.line.startsWith('The picture is queued')", 5)
    page.screenshot("panel-sampled")
    page.page.locator(".overlay .close").click()
    panel.press("sample")
    expect(field).to_have_value("a red circle, r and q")
    page.page.keyboard.press("Escape")
    field.wait_for(state="detached")


def _read_the_chart(page: Canvas, panel: Panel) -> None:
    """Hover, zoom by a drag, back by a double click; the axis by choice."""
    plot = page.page.locator(".panel .plot")
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    tip = page.page.locator(".panel .chart-tip")
    expect(tip).to_contain_text("learning rate")
    expect(tip).to_contain_text("step")
    page.screenshot("panel-hover")
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=4)
    page.page.mouse.up()
    first = page.page.locator(".panel .steps span:first-child")
    expect(first).not_to_have_text("1")  # it is zoomed in
    zoomed = panel.read()["last"]
    panel.wait(f"step > {int(zoomed) + 8}")
    assert panel.read()["last"] == zoomed, "it stays while the run goes on"
    assert page.page.evaluate("() => window.app.canvas.ds.scale") == 1, "the canvas was not moved"
    shows_all = page.page.locator(".panel .mark.all")
    shows_all.click()
    expect(shows_all).to_be_hidden()
    expect(first).to_have_text("1")
    page.page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=4)
    page.page.mouse.up()
    expect(shows_all).to_be_visible()
    plot.dblclick()
    panel.wait(f"Number(p.last) > {zoomed}")
    expect(first).to_have_text("1")
    log = page.page.locator(".panel .mark.log")
    before = log.get_attribute("aria-pressed")
    log.click()
    expect(log).not_to_have_attribute("aria-pressed", before or "")
    plot.focus()
    page.page.keyboard.press("ArrowLeft")
    expect(tip).to_be_visible()


def test_a_zoom_into_a_long_run_shows_its_single_steps(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    long_run(server, "long", 9000)
    train = demo(page, "long", 9000)
    page.show(train)
    panel = page.panel(train)
    panel.wait("p.state === 'Stopped' && p.curve === 1800")
    plot = page.page.locator(".panel .plot")
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2

    def drag(begin: float, end: float) -> None:
        page.page.mouse.move(box["x"] + box["width"] * begin, middle)
        page.page.mouse.down()
        page.page.mouse.move(box["x"] + box["width"] * end, middle, steps=4)
        page.page.mouse.up()

    page.screenshot("long-run")
    drag(0.5, 0.53)
    first, last = (page.page.locator(f".panel .steps span:{which}-child") for which in ("first", "last"))
    expect(first).not_to_have_text("1")
    begin, end = (int(mark.inner_text().replace(",", "")) for mark in (first, last))
    panel.wait(f"p.curve >= {end - begin}")  # every step of it, in the place of every fifth
    assert 200 < end - begin < 400 and panel.read()["curve"] <= end - begin + 3
    page.screenshot("long-run-zoomed")
    asked = [url for url in page.requests if "/losses?" in url]
    assert len(asked) == 1
    page.wait_quiet()
    plot.dblclick()
    panel.wait("p.curve === 1800")
    expect(first).to_have_text("5")

"""What is said when something fails: on the node, on the panel behind it, and nothing twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import psutil
import pytest
from playwright.sync_api import expect

from tests.browser.canvas import Canvas
from tests.browser.runs import DEMO, MANY, demo, long_run, skip_old_vue, stop, wait_idle
from tests.comfyui.server import Server


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process by its POSIX signal")
def test_a_worker_that_is_killed_shows_as_interrupted(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "killed", MANY)
    panel = page.panel(train)
    page.queue()
    panel.wait("p.state === 'Training' && step > 5", 300)
    run_dir = server.home / "killed"
    workers = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]
    assert len(workers) == 1
    workers[0].kill()
    panel.wait("p.state === 'Interrupted' && p.line.includes('ended without a word') && !p.pause && !p.stop")
    panel.wait("p.error && p.hint.includes('queue')")
    wait_idle(server)
    close_dialog(page)
    page.page.wait_for_timeout(3000)
    assert not page.toast("killed").count(), "the panel says it, and ComfyUI's own notice lies there"
    page.show(train)
    page.screenshot("panel-interrupted")
    panel.press("worker-log")
    log = page.page.locator(".panel ~ dialog .log-text")
    log.wait_for()
    expect(log).to_contain_text("worker")
    page.screenshot("panel-log")
    page.page.keyboard.press("Escape")
    log.wait_for(state="detached")


def close_dialog(page: Canvas) -> None:
    """Older frontends put the line of a node that failed into a dialog over all."""
    if not page.server.install.at_least(0, 20):
        dialog = page.page.locator(".p-dialog")
        dialog.wait_for()
        page.page.keyboard.press("Escape")
        dialog.wait_for(state="detached")


@pytest.mark.parametrize("renderer, theme", [("classic", "dark"), ("vue", "light")])
def test_why_a_node_failed_is_said_on_it_and_on_the_panel_behind_it(
        canvas: Callable[..., Canvas], server: Server, renderer: str, theme: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer, theme=theme)
    run = f"no_folder_{renderer}"
    train = demo(page, run, 1)
    failing = str(page.page.evaluate("""() => {
      const graph = window.app.canvas.graph, dataset = window.LiteGraph.createNode('FluxFFTDataset')
      graph.add(dataset)
      dataset.pos = [40, -520]
      dataset.connect(0, graph.nodes.find((n) => n.type === 'FluxFFTStart'), 'dataset')
      return dataset.id
    }"""))
    panel = page.panel(train)
    page.queue()
    shown = panel.wait("p.state === 'Not started' && p.error")
    assert shown["line"].startswith("The prompt ended before training, at Training Pictures: folder is empty: give the")
    page.wait_said(failing, "folder is empty: give the path")
    close_dialog(page)
    page.page.wait_for_timeout(1000)
    assert not page.toast("folder is empty").count(), "no toast over ComfyUI's own notice"
    page.fit()
    page.screenshot(f"failed-node-{theme}")
    assert page.contrasts(".panel") == [] and page.contrasts(".said") == []
    assert not (server.home / run).exists()

    # Another workflow with a node of that id is not meant; back in this one, it still is.
    workflow = page.saved()
    other = json.loads(DEMO.read_text(encoding="utf-8"))
    other["id"] = "00000000-0000-4000-8000-000000000002"
    page.load(other)
    page.panel(train).wait("p.state === 'No run yet'")
    page.load(workflow)
    panel.wait("p.state === 'Not started'")
    page.wait_said(failing, "folder is empty: give the path")

    # The next prompt takes it back.
    page.page.evaluate("""(id) => {
      const graph = window.app.canvas.graph, node = graph.getNodeById(id)
      node.disconnectOutput(0)
      graph.nodes.find((n) => n.type === 'FluxFFTDemo').connect(1, graph.nodes.find((n) => n.type === 'FluxFFTStart'),
        'dataset')
    }""", failing)
    page.queue()
    panel.wait("p.state !== 'Not started' && !p.error && !p.line.includes('folder is empty')")
    assert page.said(failing) == []
    try:
        panel.wait("p.state === 'Finished'", 300)
    finally:
        stop(server, run)


@pytest.mark.parametrize("renderer", ["classic", "vue"])
def test_why_a_value_is_not_taken_is_said_on_its_node(
        canvas: Callable[..., Canvas], server: Server, renderer: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer)
    train = demo(page, 'my/run: "1"', 1)
    panel = page.panel(train)
    start = next(n["id"] for n in page.nodes() if n["type"] == "FluxFFTStart")
    page.queue()
    page.wait_said(start, "leave out '\"' '/' ':'")
    (line,) = page.said(start)
    assert line.startswith("run_name: run name is 'my/run")
    shown = panel.wait("p.state === 'Not started' && p.error")
    assert shown["line"].startswith("The prompt ended before training, at Start or Continue a Run: run_name: run name")
    close_dialog(page)
    page.fit()
    page.screenshot("refused-value")

    # A node has several values that are not taken; one that was set right says nothing any more.
    page.page.evaluate("""([start, train, name]) => {
      const value = (id, widget, to) => {
        window.app.canvas.graph.getNodeById(id).widgets.find((w) => w.name === widget).value = to
      }
      value(start, 'run_name', name)
      value(train, 'steps', 0)
    }""", [start, train, f"refused_{renderer}"])
    page.queue()
    panel.wait("p.error && p.line.includes('steps')")
    assert page.said(start) == []
    close_dialog(page)

    page.page.evaluate("""(train) => {
      window.app.canvas.graph.getNodeById(train).widgets.find((w) => w.name === 'steps').value = 1
    }""", train)
    page.queue()
    try:
        panel.wait("!p.error && p.state !== 'Not started'")
        panel.wait("p.state === 'Finished'", 300)
    finally:
        stop(server, f"refused_{renderer}")


def test_why_a_picture_that_was_asked_for_failed_is_said_on_the_panel(
        canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    long_run(server, "no_weights", 30)  # its model is not there
    train = demo(page, "no_weights", 30)
    page.show(train)
    panel = page.panel(train)
    panel.wait("p.state === 'Stopped'")
    panel.press("sample")
    page.page.locator(".overlay textarea").fill("a star")
    page.page.keyboard.press("Enter")
    shown = panel.wait("p.error")
    assert shown["line"] and "queued" not in shown["line"]

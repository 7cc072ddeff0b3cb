"""The panel over a real run: the demo graph is queued on the real canvas, watched, reloaded, paused, stopped."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.browser.canvas import Canvas
from tests.comfyui.server import Rejected, Server

DEMO = Path(__file__).resolve().parents[2] / "example_workflows" / "demo on any machine - Flux full fine-tune.json"
MANY = 1_000_000
"""More steps than are trained while a test lasts."""


def skip_old_vue(server: Server, renderer: str) -> None:
    if renderer == "vue" and not server.install.at_least(0, 20):
        pytest.skip("Nodes 2.0 is not finished in this frontend")


def demo(page: Canvas, run: str, steps: int) -> str:
    """Load the demo graph under this run name; returns the id of its first Train Steps, whose steps are set."""
    workflow = json.loads(DEMO.read_text(encoding="utf-8"))
    page.load(workflow)
    return page.page.evaluate("""([run, steps]) => {
      const set = (node, name, value) => {
        const widget = node.widgets.find((w) => w.name === name)
        widget.value = value
        widget.callback?.(value)
      }
      const nodes = window.app.canvas.graph.nodes
      set(nodes.find((n) => n.type === 'FluxFFTStart'), 'run_name', run)
      const train = nodes.filter((n) => n.type === 'FluxFFTTrainSteps').sort((a, b) => a.pos[0] - b.pos[0])[0]
      set(train, 'steps', steps)
      window.app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.()
      return String(train.id)
    }""", [run, steps])


def with_previews(page: Canvas, every: int) -> None:
    """Have pictures made every so many steps; 0: none."""
    page.page.evaluate("""(every) => {
      const settings = window.app.canvas.graph.nodes.find((n) => n.type === 'FluxFFTPreviewSettings')
      settings.widgets.find((w) => w.name === 'every_n_steps').value = every
    }""", every)


def wait_idle(server: Server, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        queue = server.get("/queue")
        if not queue["queue_running"] and not queue["queue_pending"]:
            return
        assert time.monotonic() < end, f"the prompt did not end\n{server.tail(30)}"
        time.sleep(0.1)


def stop(server: Server, run: str) -> None:
    server.post(f"/flux_fft/runs/{run}/stop", {})
    wait_idle(server)


@pytest.mark.parametrize("renderer, theme", [("classic", "light"), ("vue", "dark")])
def test_without_a_run_the_panel_says_so_and_keeps_quiet(
        canvas: Callable[..., Canvas], server: Server, renderer: str, theme: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer, theme=theme)
    train = demo(page, "never_started", 100)
    page.show(train)
    panel = page.panel(train)
    shown = panel.wait("p.state === 'No run yet'")
    assert not shown["pause"] and not shown["stop"] and shown["run"] == ""
    page.screenshot(f"panel-no-run-{theme}")
    assert panel.cut_off() == []
    asked = len(page.requests)
    page.page.wait_for_timeout(4000)
    assert len(page.requests) == asked, page.requests


@pytest.mark.parametrize("renderer, theme", [("classic", "dark"), ("vue", "light")])
def test_a_run_is_followed_live_across_a_reload_and_paused_and_stopped(
        canvas: Callable[..., Canvas], server: Server, renderer: str, theme: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer, theme=theme)
    run = f"live_{renderer}_{theme}"
    train = demo(page, run, MANY)
    page.show(train)
    panel = page.panel(train)
    page.queue()
    try:
        panel.wait("p.state === 'Training' && step > 30", 180)
        assert panel.read()["run"] == run
        _keeps_up(page, panel, run)
        page.screenshot(f"panel-training-{theme}")
        assert panel.cut_off() == [] and page.contrasts(".panel") == []
        page.show(train, scale=1.5)
        page.screenshot(f"panel-training-150-{theme}")
        assert panel.cut_off() == []

        before = panel.read()
        page.reload()
        begin = time.monotonic()
        after = panel.wait(f"p.state === 'Training' && p.run === '{run}'", 10)
        assert time.monotonic() - begin < 5
        assert _step(after) >= _step(before) and after["curve"] >= min(before["curve"], 500)
        panel.wait(f"step > {_step(after)}", 10)
        page.show(train)

        panel.press("pause")
        paused = panel.wait("p.state === 'Paused'", 30)
        wait_idle(server, 30)
        page.page.wait_for_timeout(1500)
        page.screenshot(f"panel-paused-{theme}")
        paused = panel.read()
        assert not paused["pause"] and paused["stop"] and not paused["error"]
        assert _step(paused) == server.steps(run)[-1]

        page.queue()
        panel.wait(f"p.state === 'Training' && step > {_step(paused)}", 60)
        panel.press("stop")
        stopped = panel.wait("p.state === 'Stopped'", 60)
        wait_idle(server, 30)
        assert not stopped["pause"] and not stopped["stop"]
        page.screenshot(f"panel-stopped-{theme}")
        asked = len(page.requests)
        page.page.wait_for_timeout(3000)
        assert len(page.requests) == asked, "quiet when nothing runs"
        # Every step once, none lost and none twice, through all of this.
        steps = server.steps(run)
        assert steps == list(range(1, len(steps) + 1)) and _step(panel.read()) == len(steps)
    finally:
        stop(server, run)


def test_the_tools_of_the_panel(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "tools", MANY)
    with_previews(page, 0)
    page.show(train)
    panel = page.panel(train)
    page.queue()
    try:
        panel.wait("p.state === 'Training' && step > 25", 180)
        _read_the_chart(page, panel)

        panel.press("save")
        panel.wait("p.line.startsWith('Saved at step')", 30)
        page.page.get_by_text("save point of step").first.wait_for()
        assert [e for e in server.events("tools") if e["type"] == "saved"]

        field = page.page.locator(".rate-field input")
        field.fill("2")
        field.press("Enter")
        assert field.get_attribute("aria-invalid") == "true"
        panel.wait("p.line.startsWith('The learning rate is a number')", 10)
        field.fill("1.5e-4")
        field.press("Enter")
        panel.wait("p.line.includes('1.5e-4')", 30)
        changed = _event(page, "tools", "lr")
        assert changed["lr"] == pytest.approx(1.5e-4)
        step = _step(panel.read())
        panel.wait(f"step > {step + 2}", 30)
        rates = [e["lr"] for e in server.events("tools") if e["type"] == "step"][-2:]
        assert rates == pytest.approx([1.5e-4] * 2, rel=0.05), "and it stays, on the schedule"

        nodes = len(page.nodes())
        panel.press("sample")
        page.page.keyboard.type("a red circle, r and q")  # keys that the canvas has shortcuts on
        page.page.keyboard.press("Enter")
        page.page.locator(".overlay img").wait_for()
        panel.wait("p.state === 'Training'", 60)  # it went on by itself
        assert _event(page, "tools", "sample")["prompt"] == "a red circle, r and q"
        assert len(page.nodes()) == nodes
        page.screenshot("panel-sampled")
        page.page.locator(".overlay .close").click()

        with pytest.raises(Rejected, match="stop it first"):
            server.post("/flux_fft/runs/tools/delete", {})

        # Another prompt waits: it is let through, then the run goes on.
        panel.press("through")
        panel.wait("p.line.startsWith('No other prompt')", 20)
        graph = {"1": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
                 "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
        waiting = server.post("/prompt", {"prompt": graph})["prompt_id"]
        panel.press("through")
        deadline = time.monotonic() + 60
        while waiting not in server.get("/history"):
            assert time.monotonic() < deadline, server.tail(30)
            page.page.wait_for_timeout(100)
        before = _step(panel.read())
        panel.wait(f"p.state === 'Training' && step > {before + 1}", 60)

        # Resumed from the sidebar while another workflow is open.
        panel.press("pause")
        wait_idle(server, 30)
        page.load({"last_node_id": 0, "last_link_id": 0, "nodes": [], "links": [], "version": 0.4})
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
        wait_idle(server, 30)
        steps = server.steps("tools")
        assert steps == list(range(1, len(steps) + 1)), "none was lost or made twice"
    finally:
        stop(server, "tools")


def _read_the_chart(page: Canvas, panel: Any) -> None:
    """Hover, zoom by a drag, back by a double click; the axis by choice."""
    plot = page.page.locator(".panel .plot")
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    tip = page.page.locator(".panel .chart-tip")
    assert "step" in tip.inner_text() and "learning rate" in tip.inner_text()
    page.screenshot("panel-hover")
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=4)
    page.page.mouse.up()
    last = page.page.locator(".panel .steps span:last-child")
    zoomed = int(last.inner_text().replace(",", ""))
    panel.wait(f"step > {zoomed + 8}", 30)
    assert int(last.inner_text().replace(",", "")) == zoomed, "it stays while the run goes on"
    assert page.page.evaluate("() => window.app.canvas.ds.scale") == 1, "the canvas was not moved"
    plot.dblclick()
    assert int(last.inner_text().replace(",", "")) > zoomed
    log = page.page.locator(".panel .mark.log")
    before = log.get_attribute("aria-pressed")
    log.click()
    assert log.get_attribute("aria-pressed") != before
    plot.focus()
    page.page.keyboard.press("ArrowLeft")
    assert tip.is_visible()


def _event(page: Canvas, run: str, kind: str, seconds: float = 20.0) -> dict[str, Any]:
    """The newest event of a kind, once there is one."""
    for _ in range(int(seconds * 10)):
        found = [e for e in page.server.events(run) if e["type"] == kind]
        if found:
            return found[-1]
        page.page.wait_for_timeout(100)
    raise AssertionError(f"run {run} has no event {kind}")


def _step(read: dict[str, Any]) -> int:
    return int(read["step"].split("/")[0].strip().replace(",", ""))


def _keeps_up(page: Canvas, panel: Any, run: str) -> None:
    """Whatever step is made, the panel comes to show it; how late is told (a second on a machine that is free)."""
    lags = []
    for _ in range(8):
        newest, began = page.server.steps(run)[-1], time.monotonic()
        panel.wait(f"step >= {newest}", 20)
        lags.append(time.monotonic() - began)
    sys.stdout.write(f"\nlag of the panel: {sorted(lags)[4]:.2f} s, at most {max(lags):.2f} s\n")


def test_a_finished_run_and_one_that_is_queued_again_say_so(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "short", 12)
    with_previews(page, 6)
    page.show(train)
    panel = page.panel(train)
    page.queue()
    try:
        finished = panel.wait("p.state === 'Finished'", 180)
        assert finished["step"] == "12 / 12" and finished["curve"] == 12
        wait_idle(server)
        # The previews themselves, and not the picture that was shown as the progress.
        page.page.wait_for_function("""(id) => {
          const pictures = window.app.canvas.graph.getNodeById(id).imgs ?? []
          return pictures.length >= 4 && pictures.every((picture) => !picture.src.startsWith('blob:'))
        }""", arg=train)
        trained = server.steps("short")
        page.queue()
        page.page.wait_for_timeout(2500)
        wait_idle(server)
        assert server.steps("short") == trained
        shown = panel.read()
        assert shown["state"] == "Finished" and shown["line"].startswith("Queued again"), "the cache answered"
        assert "target of 12" in shown["hint"] and "raise steps" in shown["hint"]
        start = next(n for n in page.nodes() if n["type"] == "FluxFFTStart")
        assert any("16 pictures" in line for line in page.said(start["id"]))
        plot = next(n for n in page.nodes() if n["type"] == "FluxFFTLossPlot")["id"]
        assert said_fits(page, plot)
        page.fit()
        page.screenshot("finished")
        saved = page.saved()
        node = next(n for n in saved["nodes"] if str(n["id"]) == train)
        assert node["properties"]["flux_fft_run"] == "short" and len(node["widgets_values"]) == 1
        assert set(page.api_prompt()[train]["inputs"]) <= {"run", "steps", "previews", "after"}

        page.reload()
        assert "raise steps" in panel.wait("p.state === 'Finished'", 10)["line"], "the browser has forgotten the rest"
        page.queue()
        panel.wait("p.line.startsWith('Queued again') && p.hint.includes('raise steps')", 30)
        page.page.wait_for_timeout(1000)
        assert said_fits(page, plot), "the picture was there before the text"
        page.show(plot)
        page.screenshot("requeued-loss-plot")
    finally:
        stop(server, "short")


def said_fits(page: Canvas, node: str) -> bool:
    """Whether a node's text lies inside it, above its picture."""
    page.page.wait_for_function(
        "(id) => window.app.canvas.graph.getNodeById(id).widgets.some((w) => w.name === 'said')", arg=node)
    return page.page.evaluate("""(id) => {
      const node = window.app.canvas.graph.getNodeById(id)
      node.arrange?.()
      const at = (name) => node.widgets.findIndex((w) => w.name === name)
      const said = node.widgets[at('said')], picture = at('$$canvas-image-preview')
      const bottom = said.y + 10 + said.element.offsetHeight
      return bottom <= node.size[1] && (picture < 0 || bottom <= node.widgets[picture].y)
    }""", node)


def test_a_run_that_was_queued_without_a_workflow_shows_only_where_the_graph_leads_to_it(
        canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "by_api", 5)
    prompt = page.api_prompt()
    page.load({"last_node_id": 0, "last_link_id": 0, "nodes": [], "links": [], "version": 0.4})
    page.page.evaluate("""(id) => {
      const node = window.LiteGraph.createNode('FluxFFTTrainSteps')
      node.id = id
      window.app.canvas.graph.add(node)
    }""", int(train))
    server.post("/prompt", {"prompt": prompt})
    try:
        wait_idle(server, 180)
        page.page.wait_for_timeout(2000)
        assert server.steps("by_api") == [1, 2, 3, 4, 5]
        assert {"run": "by_api", "workflow_id": "", "node_id": train} in server.get("/flux_fft/runs")["places"]
        shown = page.panel(train).read()
        assert shown["state"] == "No run yet" and not shown["stop"]
        demo(page, "other", 5)
        page.page.wait_for_timeout(1000)
        assert page.panel(train).read()["state"] == "No run yet", "its Start names another run"
        named = json.loads(DEMO.read_text(encoding="utf-8"))
        named["id"] = "00000000-0000-4000-8000-000000000001"
        next(n for n in named["nodes"] if n["type"] == "FluxFFTStart")["widgets_values"][0] = "by_api"
        page.load(named)
        page.panel(train).wait("p.state === 'Finished' && p.run === 'by_api'", 10)
    finally:
        stop(server, "by_api")


def test_the_properties_panel_leaves_the_panel_as_wide_as_its_node(
        canvas: Callable[..., Canvas], server: Server) -> None:
    if not server.install.at_least(0, 20):
        pytest.skip("there is no properties panel in this frontend")
    page = canvas()
    train = demo(page, "unqueued", 5)
    page.show(train)
    panel = page.panel(train)
    before = panel.read()["box"]["width"]
    page.page.evaluate("(id) => { const c = window.app.canvas; c.selectNode(c.graph.getNodeById(id)) }", train)
    page.page.get_by_label("Toggle properties panel").first.click()
    listed = page.page.locator("[data-testid='properties-panel'], .right-side-panel, aside").filter(has_text="steps")
    listed.first.wait_for(timeout=30_000)  # the node's parameters
    page.page.wait_for_timeout(1000)  # and all has its size
    page.screenshot("properties-panel")
    assert panel.read()["box"]["width"] == pytest.approx(before, abs=1)
    widget = page.page.evaluate("""(id) => {
      const w = window.app.canvas.graph.getNodeById(id).widgets.find((w) => w.name === 'status')
      w.width = 278
      window.app.canvas.setDirty(true, true)
      return w.options.hideInPanel
    }""", train)
    page.page.wait_for_timeout(500)
    assert widget and panel.read()["box"]["width"] == pytest.approx(before, abs=1)


def test_another_workflow_with_the_same_node_ids_does_not_take_the_run(
        canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "mine", MANY)
    page.queue()
    try:
        page.panel(train).wait("p.state === 'Training' && step > 3", 180)
        other = json.loads(DEMO.read_text(encoding="utf-8"))
        other["id"] = "00000000-0000-4000-8000-000000000000"
        next(n for n in other["nodes"] if n["type"] == "FluxFFTStart")["widgets_values"][0] = "other"
        page.load(other)
        page.page.wait_for_timeout(2500)
        assert page.panel(train).read()["state"] == "No run yet"
    finally:
        stop(server, "mine")


def test_events_that_were_lost_with_the_connection_are_made_up_for(
        canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "dropped", MANY)
    panel = page.panel(train)
    page.queue()
    try:
        before = _step(panel.wait("p.state === 'Training' && step > 10", 180))
        page.page.context.set_offline(True)  # no new connection ...
        page.page.evaluate("() => window.app.api.socket.close()")  # ... and the one there is goes down
        panel.wait("p.line.startsWith('No connection')", 20)
        page.page.wait_for_timeout(3000)
        page.page.context.set_offline(False)
        # All steps come to be in the curve, those of the gap too.
        panel.wait(f"p.state === 'Training' && step > {before + 10} && p.curve === step", 30)
        page.problems.clear()  # the requests that failed while there was no connection
    finally:
        stop(server, "dropped")


@pytest.mark.skipif(sys.platform == "win32", reason="kills a process by its POSIX signal")
def test_a_worker_that_is_killed_shows_as_interrupted(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "killed", MANY)
    panel = page.panel(train)
    page.queue()
    panel.wait("p.state === 'Training' && step > 5", 180)
    run_dir = server.home / "killed"
    workers = [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]
    assert len(workers) == 1
    workers[0].kill()
    shown = panel.wait("p.state === 'Interrupted'", 20)
    wait_idle(server)
    assert "queue" in shown["line"] and not shown["pause"] and not shown["stop"]
    page.page.wait_for_timeout(1000)
    page.page.keyboard.press("Escape")  # older frontends put the error into a dialog over all
    page.page.wait_for_timeout(500)
    page.show(train)
    page.screenshot("panel-interrupted")
    panel.press("worker-log")
    log = page.page.locator(".panel ~ dialog .log-text")
    log.wait_for()
    assert "worker" in log.inner_text()
    page.screenshot("panel-log")
    page.page.keyboard.press("Escape")
    log.wait_for(state="detached")


def test_why_a_node_failed_is_said_at_once(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    demo(page, "no_folder", 1)
    page.page.evaluate("""() => {
      const graph = window.app.canvas.graph, dataset = window.LiteGraph.createNode('FluxFFTDataset')
      graph.add(dataset)
      dataset.connect(0, graph.nodes.find((n) => n.type === 'FluxFFTStart'), 'dataset')
    }""")
    page.queue()
    page.page.locator(".p-toast-message", has_text="folder is empty").wait_for()
    assert not (server.home / "no_folder").exists()


def test_routes_refuse_what_is_not_there(server: Server) -> None:
    def status(path: str, method: str = "GET", body: bytes = b"", kind: str = "application/json") -> int:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{server.port}/flux_fft{path}", body or None,
                                             {"Content-Type": kind}, method=method)
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            line = json.load(error)["error"]
            assert line and "\n" not in line and error.code in (400, 404, 409)
            return error.code

    assert status("/runs") == 200
    for what in ("", "/details", "/graph", "/log", "/samples/a.png"):
        assert status(f"/runs/missing{what}") == 404, what
        assert status(f"/runs/%2e%2e{what}") == 400, what
        assert status(f"/runs/..%2f..%2fuser{what}") == 400, what
    for action in ("pause", "stop", "save", "lr", "delete"):
        assert status(f"/runs/missing/{action}", "POST") == 404, action
        assert status(f"/runs/%2e%2e/{action}", "POST", b"{}") == 400, action
        assert status(f"/runs/missing/{action}", "POST", b"[1") == 400, action
        assert status(f"/runs/missing/{action}", "POST", b"{}", "text/plain") == 400, "any web page may send that"
    assert status("/datasets", "POST", b"no json") == 400
    for method, end in (("PUT", "?path=a.png"), ("POST", "/finish"), ("DELETE", "")):
        assert status(f"/datasets/0123456789abcdef{end}", method) == 404
    began = server.post("/flux_fft/datasets", {"name": "../x"})
    assert began["name"] == ".. x" or "/" not in began["name"]
    assert status(f"/datasets/{began['id']}?path=..%2fa.png", "PUT", b"x") == 400
    assert status(f"/datasets/{began['id']}/finish", "POST") == 404, "a refusal ended it"
    began = server.post("/flux_fft/datasets", {"name": "empty"})
    assert status(f"/datasets/{began['id']}/finish", "POST") == 400
    assert not [p for p in (server.base / "input").iterdir() if "dataset-" in p.name]

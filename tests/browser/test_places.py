"""Which run a panel shows, where, and how wide: other workflows, lost connections, the properties panel."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.browser.canvas import Canvas
from tests.browser.runs import DEMO, EMPTY, MANY, demo, step_of, stop, wait_idle
from tests.comfyui.server import Server


def test_a_run_that_was_queued_without_a_workflow_shows_only_where_the_graph_leads_to_it(
        canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "by_api", 5)
    prompt = page.api_prompt()
    page.load(EMPTY)
    page.page.evaluate("""(id) => {
      const node = window.LiteGraph.createNode('FluxFFTTrainSteps')
      node.id = id
      window.app.canvas.graph.add(node)
    }""", int(train))
    server.post("/prompt", {"prompt": prompt})
    try:
        wait_idle(server)
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
        page.panel(train).wait("p.state === 'Finished' && p.run === 'by_api'")
    finally:
        stop(server, "by_api")


def test_another_workflow_with_the_same_node_ids_does_not_take_the_run(
        canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "mine", MANY)
    page.queue()
    try:
        page.panel(train).wait("p.state === 'Training' && step > 3", 300)
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
        before = step_of(panel.wait("p.state === 'Training' && step > 10", 300))
        page.page.context.set_offline(True)  # no new connection ...
        page.page.evaluate("() => window.app.api.socket.close()")  # ... and the one there is goes down
        panel.wait("p.line.startsWith('No connection')")
        page.page.wait_for_timeout(3000)
        page.page.context.set_offline(False)
        # All steps come to be in the curve, those of the gap too.
        panel.wait(f"p.state === 'Training' && step > {before + 10} && p.curve === step")
        page.problems.clear()  # the requests that failed while there was no connection
    finally:
        stop(server, "dropped")


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
    page.page.evaluate("() => window.app.extensionManager.setting.set('Comfy.RightSidePanel.IsOpen', true)")
    listed = page.page.locator("[data-testid='properties-panel'], .right-side-panel, aside").filter(has_text="steps")
    listed.first.wait_for()  # the node's parameters
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

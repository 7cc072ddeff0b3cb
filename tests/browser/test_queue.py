"""Sample and Let through, pressed at any moment: the graph waits in the queue once at most, and Pause holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.canvas import Canvas
from tests.browser.runs import MANY, demo, event, stop, wait_idle, with_previews
from tests.comfyui.server import PACK_NAME, Server

ASIDE = {"1": {"class_type": "EmptyImage", "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0}},
         "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
TOGETHER = """async ([pack, run, actions]) => {
  const does = await import(`/extensions/${pack}/actions.mjs`)
  await Promise.all(actions.map(([action, ...given]) => does[action](run, ...given)))
}"""


def training(entries: list[list[Any]]) -> list[str]:
    """The prompts among the queue's that train."""
    return [e[1] for e in entries if any(node["class_type"] == "FluxFFTTrainSteps" for node in e[2].values())]


@pytest.mark.parametrize("previews", [0, 4])
def test_pressed_together_the_graph_waits_once_and_pause_holds(
        canvas: Callable[..., Canvas], server: Server, previews: int) -> None:
    page = canvas()
    run = f"pressed_{previews}"
    train = demo(page, run, MANY)
    with_previews(page, previews)
    page.show(train)
    panel = page.panel(train)
    page.queue()
    try:
        panel.wait("p.state === 'Training' && step > 2", 300)
        if previews:
            panel.wait("p.state === 'Sampling'", 300)
        first = training(server.get("/queue")["queue_running"])
        assert len(first) == 1
        server.post("/prompt", {"prompt": ASIDE})
        actions = [["sampleNow", "a star"], ["letThrough"], ["sampleNow", "a circle"], ["letThrough"]]
        page.page.evaluate(TOGETHER, [PACK_NAME, run, actions])
        assert len(training(server.get("/queue")["queue_pending"])) <= 1
        deadline = time.monotonic() + 300
        while True:  # the graph goes on, in another prompt
            queue = server.get("/queue")
            assert len(training(queue["queue_pending"])) <= 1
            if not queue["queue_pending"] and training(queue["queue_running"]) not in ([], first):
                break
            assert time.monotonic() < deadline, server.tail(30)
            page.page.wait_for_timeout(50)
        assert event(page, run, "sample")
        panel.wait("p.pause", 300)
        panel.press("pause")
        panel.wait("p.state === 'Paused'", 300)
        wait_idle(server)
        page.page.wait_for_timeout(4000)
        assert panel.read()["state"] == "Paused" and not server.get("/queue")["queue_running"]

        # What is to go on after a picture does not, once Stop was pressed.
        panel.press("resume")
        panel.wait("p.state === 'Training'", 300)
        page.page.evaluate(TOGETHER, [PACK_NAME, run, [["sampleNow", "a square"]]])
        panel.press("stop")
        panel.wait("p.state === 'Stopped'", 300)
        wait_idle(server)
        page.page.wait_for_timeout(4000)
        assert panel.read()["state"] == "Stopped" and not server.get("/queue")["queue_running"]
    finally:
        page.page.evaluate(TOGETHER, [PACK_NAME, run, [["halt", "stop"]]])
        stop(server, run)

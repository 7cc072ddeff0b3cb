"""What a node had to say stands on it whole: nobody scrolls a box of a few lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.canvas import Canvas
from tests.browser.runs import demo, long_run, skip_old_vue
from tests.comfyui.server import PACK_NAME, Server
from trainer.memory.doctor import Report, text
from trainer.memory.machine import Speeds

REPORT = Report(
    device="cuda", equal=True, kernel_path="compiled", speeds=Speeds(tflops=160.0, dram=60.0), pinnable_gb=90.0,
    system={"system": "Linux 6.18.44-generic x86_64", "python": "3.12.7", "torch": "2.13.0+cu130",
            "cpu": "32 threads, 16 used by torch", "ram": "125.6 GiB, 110.2 GiB free",
            "gpu": "NVIDIA GeForce RTX 5090, compute 12.0", "vram": "31.8 GiB, 30.1 GiB free", "cuda": "13.0",
            "allocator": "expandable_segments:True"},
    copies={"h2d": 55.1, "d2h": 54.2, "h2d_both": 40.5, "d2h_both": 41.1},
    disk={"write": 2.5, "read": 6.5, "free": 900.0}, seconds=105.0,
    problems=("copies are slow: use a slot of 16 lanes",),
)  # fmt: skip
"""Of a machine with a GPU: there it has most to say."""


@pytest.mark.parametrize("renderer", ["classic", "vue"])
def test_the_doctor_s_report_is_seen_whole(canvas: Callable[..., Canvas], server: Server, renderer: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer)
    node = str(page.page.evaluate("""() => {
      const node = window.LiteGraph.createNode('FluxFFTDoctor')
      window.app.canvas.graph.add(node)
      node.pos = [40, 40]
      return node.id
    }"""))
    page.page.evaluate("([id, text]) => window.app.canvas.graph.getNodeById(id).onExecuted({ text: [text] })",
                       [node, text(REPORT)])
    page.wait_said(node, "problem: copies are slow")
    page.fit()
    page.page.wait_for_function("""(id) => {
      const said = window.app.canvas.graph.getNodeById(id).widgets.find((w) => w.name === 'said').element
      const box = said.shadowRoot.querySelector('.said')
      return box.clientHeight > 200 && box.scrollHeight <= box.clientHeight + 1
    }""", arg=node)
    page.screenshot(f"doctor-{renderer}")


PAUSED = {"state": "paused", "worker": {}, "ram_gb": 0.6, "idle_exit": 1800}
NOTHING = ("Nothing to train: run 'a_run_with_a_name_of_some_length' is at step 1,500 and this node's target is 1,200 "
           "(step 0 + 1,200). Raise steps to train further.")


@pytest.mark.parametrize("renderer, language", [("classic", "en"), ("vue", "zh")])
def test_the_panel_s_words_are_seen_whole_at_the_template_s_size(
        canvas: Callable[..., Canvas], server: Server, renderer: str, language: str) -> None:
    skip_old_vue(server, renderer)
    run = f"words_{renderer}"
    long_run(server, run, 60)
    page = canvas(renderer=renderer)
    server.post("/api/settings", {"Comfy.Locale": language})
    try:
        page.reload()
        train = demo(page, run, 60)
        page.show(train)
        panel = page.panel(train)
        panel.wait("p.run !== '' && p.curve > 20")

        def change(status: dict[str, object]) -> None:
            page.page.evaluate("""async ([pack, run, status]) => {
              const { runs } = await import(`/extensions/${pack}/store.mjs`)
              Object.assign(runs.get(run).status, status)
              runs.changed(runs.get(run))
            }""", [PACK_NAME, run, status])

        def say(text: str) -> None:
            page.page.evaluate("([id, text]) => window.app.canvas.graph.getNodeById(id).onExecuted({ text: [text] })",
                               [train, text])

        change(PAUSED)
        say(NOTHING)
        panel.wait("p.line.startsWith('Nothing to train') && p.hint.length > 20")
        page.page.wait_for_timeout(300)
        page.screenshot(f"panel-words-{language}")
        seen = page.page.evaluate("""(id) => {
          const node = window.app.canvas.graph.getNodeById(id)
          const root = node.widgets.find((w) => w.name === 'status').element.shadowRoot
          const [words, panel, chart] = ['.words', '.panel', '.chart'].map((css) => root.querySelector(css))
          return { hidden: words.scrollHeight - words.clientHeight, chart: chart.clientHeight,
            below: words.getBoundingClientRect().bottom - panel.getBoundingClientRect().bottom }
        }""", train)
        assert seen["hidden"] <= 1 and seen["below"] <= 0 and seen["chart"] >= 90, seen
        assert panel.cut_off() == []

        change({"state": "stopped", "worker": None})
        panel.wait("p.line !== '' && !p.line.startsWith('Nothing')")
    finally:
        server.post("/api/settings", {"Comfy.Locale": "en"})

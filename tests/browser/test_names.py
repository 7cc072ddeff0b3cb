"""Open a Run offers a run that was made while the page is open, and no more one that was deleted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.canvas import Canvas
from tests.browser.runs import EMPTY, long_run, skip_old_vue
from tests.comfyui.server import PACK_NAME, Server


@pytest.mark.parametrize("renderer", ["classic", "vue"])
def test_a_new_run_is_offered_at_once(canvas: Callable[..., Canvas], server: Server, renderer: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer)
    page.load(EMPTY)
    make = """() => {
      const node = window.LiteGraph.createNode('FluxFFTOpenRun')
      window.app.canvas.graph.add(node)
      node.pos = [40 + 400 * window.app.canvas.graph.nodes.length, 60]
      return String(node.id)
    }"""
    first = page.page.evaluate(make)
    name = f"made_later_{renderer}"
    long_run(server, name, 20)

    def store(call: str) -> None:
        page.page.evaluate("""async ([pack, name, call]) => {
          await (await import(`/extensions/${pack}/store.mjs`)).runs[call](name)
        }""", [PACK_NAME, name, call])

    def offered(node: str) -> list[str]:
        return page.page.evaluate("""(id) => window.app.canvas.graph.getNodeById(id).widgets
          .find((w) => w.name === 'run_name').options.values""", node)

    assert name not in offered(first)
    store("load")
    assert offered(first).count(name) == 1
    page.page.wait_for_timeout(500)
    if renderer == "vue":
        page.show(first)
        page.page.locator("[data-testid=widget-select-default-trigger]").first.click()
        page.page.get_by_role("option", name=name).first.wait_for()
        page.screenshot("run-offered")
        page.page.keyboard.press("Escape")
    second = page.page.evaluate(make)
    assert offered(second).count(name) == 1
    store("forget")
    assert name not in offered(first) + offered(second)

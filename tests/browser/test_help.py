"""A node's help, opened in the real frontend as a user does: the page is there, and so is its picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.canvas import Canvas
from tests.comfyui.server import PACK_NAME, Server

_ADD = """() => {
  const { canvas } = window.app
  canvas.graph.clear()
  const node = window.LiteGraph.createNode('FluxFFTStart')
  canvas.graph.add(node)
  canvas.ds.offset = [300, 400]  // its tools lie above it
  canvas.selectNode(node)
  canvas.setDirty(true, true)
}"""


def test_help_shows_the_node_connected(canvas: Callable[..., Canvas], server: Server) -> None:
    if not server.install.at_least(0, 20):
        pytest.skip("older frontends open help elsewhere")
    page = canvas()
    page.page.evaluate(_ADD)
    page.page.locator("[data-testid='info-button']").first.click()
    help_page = page.page.locator(".node-help-content")
    picture = help_page.locator("img").first
    picture.wait_for()
    picture.evaluate("(img) => img.decode()")
    assert picture.get_attribute("src") == f"/extensions/{PACK_NAME}/docs/pictures/FluxFFTStart.png"
    assert picture.evaluate("(img) => img.naturalWidth") > 0
    assert "Puts together what a training needs" in help_page.inner_text()
    page.screenshot("help")
    # The frontend asks for a page in the user's language first, and takes the other where there is none.
    page.problems = [problem for problem in page.problems if "/docs/FluxFFTStart/en.md" not in problem]

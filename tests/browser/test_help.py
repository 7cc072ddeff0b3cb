"""A node's help, opened in the real frontend as a user does: the page is there, and so is its picture."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Locator

from tests.browser.canvas import Canvas
from tests.comfyui.server import PACK, PACK_NAME, Server
from tests.comfyui.test_locales import read

_ADD = """(type) => {
  const { canvas } = window.app
  canvas.graph.clear()
  const node = window.LiteGraph.createNode(type)
  canvas.graph.add(node)
  canvas.ds.offset = [500, 400]  // its tools lie above it, help beside it
  canvas.selectNode(node)
  canvas.setDirty(true, true)
}"""
_TITLES = "() => Object.values(window.LiteGraph.registered_node_types).map((type) => type.title)"
_TEXTS = f"""async (code) => {{
  const texts = (tree) => Object.values(tree).flatMap((one) => typeof one === 'object' ? texts(one) : [one])
  const tables = await import(`/extensions/{PACK_NAME}/strings_${{code}}.mjs`)
  return texts(tables[code.toUpperCase()]).filter((text) => typeof text === 'string')
}}"""
DOCS = PACK / "web/docs"


def open_help(page: Canvas, kind: str) -> Locator:
    """The page of a node that is selected alone, its picture loaded."""
    page.page.evaluate(_ADD, kind)
    help_page = page.page.locator(".node-help-content")
    if not help_page.count() or not page.server.install.at_least(0, 20):  # where help does not follow the selection
        page.page.locator("[data-testid='info-button']").first.click()
    source = f"/extensions/{PACK_NAME}/docs/pictures/{kind}.png"
    picture = help_page.locator(f"img[src='{source}']")
    picture.wait_for()
    picture.evaluate("(img) => img.decode()")
    assert picture.evaluate("(img) => img.naturalWidth") > 0
    return help_page


def test_help_shows_the_node_connected(canvas: Callable[..., Canvas]) -> None:
    page = canvas()
    assert "Puts together what a training needs" in open_help(page, "FluxFFTStart").inner_text()
    page.screenshot("help")
    # The frontend asks for a page in the user's language first, and takes the other where there is none.
    page.problems = [problem for problem in page.problems if "/docs/FluxFFTStart/en.md" not in problem]


def test_help_is_in_the_language_that_is_set(canvas: Callable[..., Canvas], server: Server) -> None:
    """Every page, as it is rendered: no mark of Markdown is left, and all that it quotes is found on the canvas."""
    server.post("/api/settings", {"Comfy.Locale": "zh"})
    try:
        page = canvas()
        known = {*page.page.evaluate(_TITLES), *page.page.evaluate(_TEXTS, "zh")}
        for kind, node in read("zh", "nodeDefs.json").items():
            help_page = open_help(page, kind)
            assert help_page.locator("h1").inner_text() == node["display_name"]
            text, source = help_page.inner_text(), (DOCS / kind / "zh.md").read_text(encoding="utf-8")
            assert not re.search(r"\*|`|\|", text), kind
            rows = [line for line in source.splitlines() if line.startswith("|") and not line.startswith("|-")]
            assert help_page.locator("tr").count() == len(rows)
            assert set(re.findall("\u201c([^\u201d]+)\u201d", text)) <= known, kind
            if kind == "FluxFFTTrainSteps":
                page.screenshot("help-zh")
    finally:
        server.post("/api/settings", {"Comfy.Locale": "en"})

"""Another language, chosen in ComfyUI's settings: nodes, panel and tab speak it."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.browser.canvas import Canvas
from tests.browser.runs import demo, long_run
from tests.comfyui.server import PACK, PACK_NAME, Server
from tests.comfyui.test_locales import LANGUAGES, read

OTHERS = [language for language in LANGUAGES if language != "en"]


def test_there_is_a_module_of_texts_for_each() -> None:
    assert OTHERS and {p.stem for p in (PACK / "web").glob("strings_*.mjs")} == {f"strings_{one}" for one in OTHERS}


def test_all_that_is_shown_speaks_the_language_that_is_set(canvas: Callable[..., Canvas], server: Server) -> None:
    for language in OTHERS:
        server.post("/api/settings", {"Comfy.Locale": language})
        try:
            page = canvas()
            if not (server.home / "spoken").exists():
                long_run(server, "spoken", 1500)
            train = demo(page, "never_started", 100)
            texts = page.page.evaluate(
                f"async () => (await import('/extensions/{PACK_NAME}/strings_{language}.mjs'))['{language.upper()}']"
                ".states.none")
            assert texts != "No run yet"
            page.panel(train).wait(f"p.state === {json.dumps(texts)}")
            title = page.page.evaluate("(id) => window.app.canvas.graph.getNodeById(id).title", train)
            assert title == read(language, "nodeDefs.json")["FluxFFTTrainSteps"]["display_name"]
            row = page.open_tab().locator(".runs button", has_text="spoken").locator(".about")
            row.wait_for()
            assert ", " not in row.inner_text(), "commas are the language's own"
            row.click()
            page.page.locator(".run button.export").wait_for()
            page.screenshot(f"language-{language}")
        finally:
            server.post("/api/settings", {"Comfy.Locale": "en"})

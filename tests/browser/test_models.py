"""Who lacks the files of an example is told where they come from, and where they go."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.canvas import Canvas
from tests.browser.runs import DEMO
from tests.comfyui.make_examples import MODELS
from tests.comfyui.server import Server

FOUR = DEMO.with_name("FLUX.1 dev in four nodes - Flux full fine-tune.json")


def test_folders_and_downloads_of_missing_files_are_named(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    page.load(json.loads(FOUR.read_text(encoding="utf-8")))
    if server.install.at_least(0, 20):
        page.page.get_by_text("View details").first.click()
    body = page.page.locator("body")
    for name, model in MODELS.items():
        expect(body).to_contain_text(name)
        expect(body).to_contain_text(model["directory"])
    expect(page.page.get_by_role("button", name="Download").first).to_be_visible()
    expect(body).not_to_contain_text("Unknown")
    page.screenshot("missing-models")

"""The nodes are found by what a newcomer types."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.canvas import Canvas
from tests.browser.runs import EMPTY
from tests.comfyui.server import Server

MAIN = ("Start or Continue a Run", "Train Steps")
TYPED = {"flux full": MAIN, "fine-tune": MAIN, "fine tune": MAIN, "finetune": MAIN, "full fine-tune": MAIN,
         "train flux": MAIN, "dreambooth": MAIN, "nadam": ("Optimizer: NAdam / AdamW",),
         "dataset": ("Training Pictures",), "captions": ("Training Pictures", "Caption Settings"),
         "block swap": ("Memory and Device",), "save checkpoint": ("Export Checkpoint",)}


def test_every_node_has_other_names(server: Server) -> None:
    if not server.install.at_least(0, 20):
        pytest.skip("this ComfyUI knows no other names of nodes")
    known = {name: kind for name, kind in server.get("/object_info").items() if name.startswith("FluxFFT")}
    assert len(known) >= 15
    assert [name for name, kind in known.items() if len(kind["search_aliases"]) < 3] == []


def test_a_double_click_s_search_finds_them(canvas: Callable[..., Canvas], server: Server) -> None:
    if not server.install.at_least(0, 20):
        pytest.skip("this ComfyUI knows no other names of nodes")
    page = canvas()
    page.load(EMPTY)
    page.page.mouse.dblclick(800, 500)
    field = page.page.locator("input[role=combobox]")
    for text, names in TYPED.items():
        field.fill(text)
        for name in names:
            page.page.get_by_role("option").filter(has_text=name).first.wait_for(timeout=10_000)
    page.screenshot("search")

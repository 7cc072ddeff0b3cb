"""The help pages: each has its picture, small enough to be cloned by everyone, and no picture is left over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

DOCS = Path(__file__).resolve().parents[2] / "web/docs"
PAGES = sorted(DOCS.glob("*.md"))
LIMIT = 60_000
"""Bytes of a picture."""


def pictures(page: Path) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_shows_its_node_connected(page: Path) -> None:
    assert pictures(page) == [f"pictures/{page.stem}.png"], "relative, as ComfyUI resolves it below the pack's docs"
    path = DOCS / pictures(page)[0]
    assert path.stat().st_size <= LIMIT, "python -m tests.browser.make_pictures help"
    with Image.open(path) as picture:
        assert picture.format == "PNG" and min(picture.size) >= 150


def test_no_picture_is_left_over() -> None:
    assert {p.stem for p in (DOCS / "pictures").iterdir()} == {p.stem for p in PAGES}

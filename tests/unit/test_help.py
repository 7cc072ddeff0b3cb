"""The help pages: each has its picture, small enough to be cloned by everyone, and no picture is left over.

ComfyUI's frontend looks for ``docs/NODE/LANGUAGE.md`` and then for ``docs/NODE.md``, which is the English one; pictures
are taken relative to ``docs``, whatever the page's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

PACK = Path(__file__).resolve().parents[2]
DOCS = PACK / "web/docs"
PAGES = sorted(DOCS.glob("*.md"))
LANGUAGES = sorted(p.name for p in (PACK / "locales").iterdir() if p.is_dir() and p.name != "en" and p.name.isalpha())
LIMIT = 60_000
"""Bytes of a picture."""


def nodes(language: str) -> dict[str, Any]:
    """The nodes' texts as the canvas shows them."""
    return json.loads((PACK / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def read(name: str, language: str = "en") -> str:
    path = DOCS / f"{name}.md" if language == "en" else DOCS / name / f"{language}.md"
    return path.read_text(encoding="utf-8")


def pictures(text: str) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)


def spans(text: str) -> set[str]:
    """What stands between backticks."""
    return set(re.findall("`([^`]+)`", text))


def inputs(text: str) -> list[str]:
    """What the tables' rows are about, where that is inputs."""
    return [name for row in re.findall(r"^\| (`[^|]+)\|", text, re.MULTILINE) for name in re.findall("`([^`]+)`", row)]


def kinds(text: str) -> Iterator[str]:
    """What the page is built of: headings, pictures, tables and lists with their lengths, paragraphs."""
    for block in re.split(r"\n{2,}", text.strip()):
        lines = block.splitlines()
        if lines[0].startswith("#"):
            yield f"heading {lines[0].index(' ')}"
        elif lines[0].startswith("!["):
            yield "picture"
        elif lines[0].startswith("|"):
            yield f"table of {len(lines)} rows"
        elif lines[0].startswith("- "):
            yield f"list of {sum(line.startswith('- ') for line in lines)}"
        else:
            yield "bold paragraph" if lines[0].startswith("**") else "paragraph"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_shows_its_node_connected(page: Path) -> None:
    assert pictures(read(page.stem)) == [f"pictures/{page.stem}.png"], "relative to the pack's docs"
    path = DOCS / f"pictures/{page.stem}.png"
    assert path.stat().st_size <= LIMIT, "python -m tests.browser.make_pictures help"
    with Image.open(path) as picture:
        assert picture.format == "PNG" and min(picture.size) >= 150


def test_no_picture_is_left_over() -> None:
    assert {p.stem for p in (DOCS / "pictures").iterdir()} == {p.stem for p in PAGES}


def test_each_node_has_a_page_in_each_language() -> None:
    assert LANGUAGES and {p.stem for p in PAGES} == nodes("en").keys()
    wanted = {f"{name}/{language}.md" for name in nodes("en") for language in LANGUAGES}
    assert {p.relative_to(DOCS).as_posix() for p in DOCS.glob("*/*.md")} == wanted


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
@pytest.mark.parametrize("name", [p.stem for p in PAGES])
def test_a_page_names_what_the_canvas_shows(name: str, language: str) -> None:
    page, node = read(name, language), nodes(language)[name]
    assert page.startswith(f"# {node['display_name']}\n")
    shown = {one["name"] for one in node["inputs"].values()}
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} <= {3}, "the help panel is narrow"
    assert set(inputs(page)) <= shown
    assert shown <= spans(page)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [p.stem for p in PAGES])
def test_a_translation_says_what_the_english_page_does(name: str, language: str) -> None:
    english, page = read(name), read(name, language)
    assert list(kinds(page)) == list(kinds(english))
    assert pictures(page) == pictures(english)
    assert inputs(page) == inputs(english), "the same rows in the same order"
    outputs = {out["name"]: nodes(language)[name]["outputs"][n]["name"]
               for n, out in nodes("en")[name]["outputs"].items()}  # fmt: skip
    panel = translated(language)
    lost = {one for one in spans(english) if not {one, outputs.get(one), panel.get(one)} & spans(page)}
    assert not lost, "names, values and files"
    others = {node["display_name"]: nodes(language)[id]["display_name"] for id, node in nodes("en").items()}
    named = {others[one] for one in re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", english) if one in others}
    assert {one for one in named if f"\u201c{one}\u201d" not in page} == set(), "nodes, in quotation marks"


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_buttons_and_curves_are_called_as_on_the_panel(language: str) -> None:
    page, panel = read("FluxFFTTrainSteps", language), texts(language)
    buttons = ("pause", "resume", "stop", "save", "sample", "letThrough", "lr", "log")
    assert [panel[key] for key in buttons if f"**{panel[key]}**" not in page] == []
    assert {panel[key] for key in ("raw", "smooth", "fixedNoise", "rate", "logAxis")} <= spans(page)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*/zh.md")), ids=lambda p: p.parent.name)
def test_no_paragraph_is_broken_into_lines(page: Path) -> None:
    """A line break is shown as a space, which Chinese does not have between words."""
    blocks = re.split(r"\n{2,}", page.read_text(encoding="utf-8").strip())
    assert [block for block in blocks if "\n" in block and not all(x[0] in "|-" for x in block.splitlines())] == []


def texts(language: str) -> dict[str, str]:
    """The panel's short texts; what a language leaves out is English."""
    modules = ["strings.mjs", *([f"strings_{language}.mjs"] if language != "en" else [])]
    found = [(PACK / "web" / module).read_text(encoding="utf-8") for module in modules]
    return {key: text for module in found for key, text in re.findall(r"^  (\w+): '([^']+)',$", module, re.MULTILINE)}


def translated(language: str) -> dict[str, str]:
    """Those texts by the English ones."""
    return {text: texts(language)[key] for key, text in texts("en").items()}

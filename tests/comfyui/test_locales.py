"""Translations: English says what the schemas say, and every other language says all that English does."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.comfyui.server import PACK, Server

LOCALES = PACK / "locales"
LANGUAGES = sorted(p.name for p in LOCALES.iterdir() if p.is_dir() and p.name[0] not in "._")


def read(language: str, name: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / name).read_text(encoding="utf-8"))


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def test_english_is_what_the_schemas_say(server: Server) -> None:
    spec = importlib.util.spec_from_file_location("make_locales", LOCALES / "make.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    wanted = make.definitions(server.get("/object_info"))
    assert read("en", "nodeDefs.json") == wanted, "run python locales/make.py URL of a running ComfyUI"


@pytest.mark.parametrize("name", ["main.json", "nodeDefs.json"])
@pytest.mark.parametrize("language", [n for n in LANGUAGES if n != "en"])
def test_a_language_says_all_that_english_does(language: str, name: str) -> None:
    english, other = dict(leaves(read("en", name))), dict(leaves(read(language, name)))
    assert sorted(other) == sorted(english)
    assert all(text.strip() for text in other.values())
    same = [path for path, text in other.items() if path[-1] in ("tooltip", "description") and text == english[path]]
    assert not same, "not translated"


def test_the_server_hands_them_out(server: Server) -> None:
    given = server.get("/i18n")
    for language in LANGUAGES:
        assert given[language]["nodeDefs"]["FluxFFTStart"]["display_name"]

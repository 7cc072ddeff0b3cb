"""Paths as people paste them, and as Windows takes them."""

import os

import pytest

from trainer.data import paths
from trainer.data.paths import find_folder, long_path, windows_path

LONG = "C:\\pictures\\" + "a" * 250 + "\\b.png"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("C:\\pictures\\a.png", "C:\\pictures\\a.png"),
        ("C:/pictures/a.png", "C:/pictures/a.png"),
        (LONG, "\\\\?\\" + LONG),
        (LONG.replace("\\", "/"), "\\\\?\\" + LONG),
        ("\\\\server\\share\\" + "a" * 250, "\\\\?\\UNC\\server\\share\\" + "a" * 250),
        ("\\\\server\\share\\a.png", "\\\\server\\share\\a.png"),
        ("\\\\?\\" + LONG, "\\\\?\\" + LONG),
        ("\\\\.\\pipe\\x", "\\\\.\\pipe\\x"),
        ("C:\\my pictures \\a.png", "\\\\?\\C:\\my pictures \\a.png"),
        ("C:\\ends in a dot.\\a.png", "\\\\?\\C:\\ends in a dot.\\a.png"),
        ("C:\\x\\..\\" + "a" * 250, "\\\\?\\C:\\" + "a" * 250),
        ("C:\\x\\..\\a.png", "C:\\x\\..\\a.png"),
    ],
)
def test_windows_spelling(text, expected):
    assert windows_path(text) == expected
    assert windows_path(expected) == expected


def test_only_windows_paths_are_spelled_anew(tmp_path, monkeypatch):
    assert long_path(tmp_path / ("a" * 250) / "b ") == str(tmp_path / ("a" * 250) / "b ")
    monkeypatch.setattr(paths.os, "name", "nt")
    assert long_path(LONG) == "\\\\?\\" + LONG


@pytest.mark.parametrize("quotes", ['""', "''", "\u201c\u201d", "\u2018\u2019", "  "])
def test_quoted_paths(tmp_path, quotes):
    folder = tmp_path / "it's my \u00e9 \"folder\""
    folder.mkdir()
    assert find_folder(f"{quotes[0]}{folder}{quotes[1]}") == folder
    assert find_folder(f" {quotes[0]} {folder} {quotes[1]}\n") == folder


def test_paths_from_here_and_home(tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for text in ("pictures", "./pictures/", "pictures/../pictures", "~/pictures", '"~/pictures"'):
        assert find_folder(text) == tmp_path / "pictures"


@pytest.mark.parametrize("text", ["", " ", '""', "\0", "a\0b", "x" * 5000, "\ud800"])
def test_what_is_no_path_is_one_line(text):
    with pytest.raises(ValueError, match="does not exist"):
        find_folder(text)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_names_with_spaces_at_the_end_and_quotes(tmp_path):
    for name in ("ends in a space ", " begins with one", "'quoted'", '"', "new\nline"):
        (tmp_path / name).mkdir()
        assert find_folder(str(tmp_path / name)) == tmp_path / name

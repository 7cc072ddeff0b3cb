"""Paths as people paste them, and as operating systems have them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any


def find_folder(text: str) -> Path:
    """The folder that a person means: as written, else without quotes and outer spaces, with ``~`` expanded.

    Raises ``ValueError`` if there is none.
    """
    stripped = text.strip()
    bare = stripped.strip("\"'").strip() if stripped[:1] in "\"'" else stripped
    for candidate in (text, stripped, bare, os.path.expanduser(bare)):
        if candidate and os.path.isdir(candidate):
            return Path(os.path.abspath(candidate))
    if os.path.exists(bare):
        raise ValueError(f"dataset folder {bare} is a file: give the folder that the pictures are in")
    raise ValueError(f"dataset folder {bare} does not exist: give the path of a folder of pictures")


def natural(text: str) -> tuple[Any, ...]:
    """Sort key that puts ``2.png`` before ``10.png``."""
    parts = re.split(r"(\d+)", text)
    return tuple((int(p), "") if p.isdecimal() else (-1, p.casefold()) for p in parts), text


def shown(path: str) -> str:
    """A path as text that can be written anywhere, whatever bytes the file system gave."""
    return Path(path).as_posix().encode("utf-8", "backslashreplace").decode("utf-8")


def long_path(path: str | os.PathLike[str]) -> str:
    """The path as the system's calls take it: Windows refuses 260 characters or more unless they are spelled so."""
    text = os.fspath(path)
    if os.name == "nt" and len(os.path.abspath(text)) > 240 and not text.startswith("\\\\"):
        return "\\\\?\\" + os.path.abspath(text)
    return text

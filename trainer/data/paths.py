"""Paths as people paste them, and as operating systems have them."""

from __future__ import annotations

import ntpath
import os
import re
from pathlib import Path
from typing import Any

_WINDOWS_LIMIT = 240
"""Windows refuses paths of 260 characters, and folders of 248: a file's name must still have room."""
_QUOTES = "\"'\u201c\u201d\u2018\u2019"


def find_folder(text: str) -> Path:
    """The folder that a person means: as written, else without quotes and outer spaces, with ``~`` expanded.

    Raises ``ValueError`` if there is none.
    """
    stripped = text.strip()
    paired = len(stripped) > 1 and stripped[0] in _QUOTES and stripped[-1] in _QUOTES
    bare = stripped[1:-1].strip() if paired else stripped.strip(_QUOTES).strip()
    for candidate in (text, stripped, bare, os.path.expanduser(bare)):
        if candidate and os.path.isdir(long_path(candidate)):
            # Where it can be avoided abspath is: on Windows it drops spaces at the end.
            return Path(os.path.normpath(candidate) if os.path.isabs(candidate) else os.path.abspath(candidate))
    named = " ".join(shown(bare).splitlines())
    if os.path.exists(long_path(bare)):
        raise ValueError(f"dataset folder {named} is a file: give the folder that the pictures are in")
    raise ValueError(f"dataset folder {named} does not exist: give the path of a folder of pictures")


def natural(text: str) -> tuple[Any, ...]:
    """Sort key that puts ``2.png`` before ``10.png``."""
    parts = re.split(r"(\d+)", text)
    return tuple((int(p), "") if p.isdecimal() else (-1, p.casefold()) for p in parts), text


def shown(path: str) -> str:
    """A path as text that can be written anywhere, whatever bytes the file system gave."""
    return path.replace(os.sep, "/").encode("utf-8", "backslashreplace").decode("utf-8")


def long_path(path: str | os.PathLike[str]) -> str:
    """The path as the system's calls take it."""
    text = os.fspath(path)
    return windows_path(text) if os.name == "nt" else text


def windows_path(text: str) -> str:
    r"""A path as Windows takes it whole: long ones, and names that end in a space or a dot, only behind ``\\?\``."""
    if text.startswith(("\\\\?\\", "\\\\.\\")):
        return text
    drive, rest = ntpath.splitdrive(text)
    full = ntpath.normpath(text) if drive and rest[:1] in ("\\", "/") else ntpath.abspath(text)
    odd = any(part.endswith((" ", ".")) for part in full.split("\\"))
    if len(full) < _WINDOWS_LIMIT and not odd:
        return text
    return "\\\\?\\UNC\\" + full[2:] if full.startswith("\\\\") else "\\\\?\\" + full

"""Captions as people have them: beside the picture, in whatever encoding, or not at all."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

from .paths import long_path

EXTENSIONS = (".txt", ".caption")
_MAX_BYTES = 1 << 20
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark begins it
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff]")


@dataclass(frozen=True)
class Caption:
    """A picture's caption, and where it is from."""

    text: str
    source: str
    """``file``, ``trigger`` (the trigger word) or ``name`` (the words of the file name)."""
    warning: str = ""
    """What the user should know about it; empty: nothing."""


def caption_for(path: str | Path, trigger: str = "") -> Caption:
    """The caption of a picture: its ``.txt`` or ``.caption`` file, else the trigger word, else its name's words.

    All lines are joined by spaces. Anything but a readable, non-empty file comes with a warning; nothing is raised.
    """
    path = Path(path)
    why = "has no caption file"
    for file in _beside(path):
        try:
            with open(long_path(file), "rb") as f:
                raw = f.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            why = f"has a caption file that cannot be read ({error.strerror or error})"
            continue
        if len(raw) > _MAX_BYTES:
            why = f"has a caption file of more than {_MAX_BYTES >> 20} MiB"
            continue
        text, doubt = decode(raw)
        text = join_lines(text)
        if text:
            return Caption(text, "file", f"{file.name} {doubt}" if doubt else "")
        why = f"has an empty caption file ({file.name})"
    trigger = join_lines(trigger)
    if trigger:
        return Caption(trigger, "trigger", f"{why}: trained with the trigger word, {trigger!r}")
    words = name_words(path)
    return Caption(words, "name", f"{why}: trained with its name's words, {words!r}")


def _beside(path: Path) -> list[Path]:
    files: list[Path] = []
    for extension in EXTENSIONS:
        for spelling in (extension, extension.upper(), extension.title()):
            file = path.with_suffix(spelling)
            if file != path:
                files.append(file)
    return files


def decode(raw: bytes) -> tuple[str, str]:
    """Text of a caption file, and a doubt about its encoding (empty if there is none).

    UTF-8, UTF-16 and UTF-32 with their marks, UTF-8 or UTF-16 without, else Windows-1252.
    """
    for mark, encoding in _BOMS:
        if raw.startswith(mark):
            text = raw[len(mark) :].decode(encoding, errors="replace")
            return text, "holds bytes that its own mark forbids" if "\ufffd" in text else ""
    if b"\0" in raw:
        # Text of Latin scripts in UTF-16: every second byte is zero, and which one tells the byte order.
        order = "utf-16-be" if raw[::2].count(0) > raw[1::2].count(0) else "utf-16-le"
        try:
            return raw.decode(order), "is read as UTF-16, though it has no mark: save it as UTF-8"
        except UnicodeDecodeError:
            pass
    try:
        return raw.decode("utf-8"), ""
    except UnicodeDecodeError:
        return raw.decode("cp1252", errors="replace"), "is not UTF-8: read as Windows-1252; save it as UTF-8"


def join_lines(text: str) -> str:
    """The text's lines joined by single spaces, without control characters and outer white space."""
    lines = (_CONTROLS.sub("", line).strip() for line in text.splitlines())
    return " ".join(line for line in lines if line)


def name_words(path: Path) -> str:
    """The words of a file's name: ``red-circle_02.png`` gives ``red circle 02``."""
    # Names that are not valid text (a file system's raw bytes) must not break what is written later.
    stem = path.stem.encode("utf-8", "replace").decode("utf-8")
    return " ".join(re.split(r"[\s_.\-]+", stem)).strip() or stem

"""Captions as people have them: beside the picture, in a table, in whatever encoding, or not at all."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DatasetConfig
from .paths import long_path
from .tags import versions

EXTENSIONS = (".txt", ".caption", ".json")
"""Of caption files, the one that counts first."""
MOST_LINES = 100
"""Captions of one picture, of which one is trained at a time."""
TEXT_KEYS = ("caption", "captions", "text", "prompt", "description", "long_caption", "tags", "tag_string", "keywords")
"""Where a JSON file or a table has its captions, the first that is there and not empty."""
OWN = ("file", "table", "fixed")
"""Sources (see ``Caption``) of pictures that have a caption of their own, or need none."""
_TAG_KEYS = ("tags", "tag_string", "keywords")
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
    """A picture's captions, and where they are from."""

    texts: tuple[str, ...]
    """One of them is trained at a time; none under the policies ``skip`` and ``stop``."""
    source: str
    """``file``, ``table``, ``fixed`` (the text for all), or of one that has none: ``trigger`` (the trigger word),
    ``name`` (the words of the file name), ``folder`` (those of its folder's), ``instead`` (the fixed caption) or
    ``none``."""
    warning: str = ""
    """What the user should know about it; empty: nothing."""

    @property
    def text(self) -> str:
        """The first caption."""
        return self.texts[0]


def caption_for(path: str | Path, trigger: str = "") -> Caption:
    """The caption of a picture: that beside it, else the trigger word, else its name's words. Raises nothing."""
    return find_caption(path, DatasetConfig(folder=".", trigger_word=trigger))


def find_caption(path: str | Path, config: DatasetConfig, files: Sequence[str] | None = None,
                 table: Sequence[str] = ()) -> Caption:  # fmt: skip
    """The captions of a picture, as ``config`` wants them.

    Those of the ``files`` in its folder that are called like it (None: they are looked for), else its rows in a
    ``table``, else what ``config.missing_captions`` says. Anything but a readable, non-empty file comes with a
    warning; nothing is raised.
    """
    path = os.fspath(path)
    texts, source, warning, why = (), "", "", ""
    if config.fixed_caption.strip() and config.missing_captions != "fixed":
        texts, source = _lines(config.fixed_caption, config), "fixed"
    else:
        texts, warning, why = _beside(path, config, files)
        source = "file"
        if not texts:
            texts, source = tuple(line for text in table for line in _lines(text, config)), "table"
    if len(texts) > MOST_LINES:
        warning = f"has {len(texts)} captions: the first {MOST_LINES} are trained"
        texts = texts[:MOST_LINES]
    if not texts:
        texts, source, warning = _instead(path, config, why)
    return Caption(versions(texts, config), source, warning) if texts else Caption((), source, warning)


def _instead(path: str, config: DatasetConfig, why: str) -> tuple[tuple[str, ...], str, str]:
    policy = config.missing_captions
    if policy in ("skip", "stop"):
        return (), "none", why
    trigger = join_lines(config.trigger_word)
    if policy == "fixed":
        return _lines(config.fixed_caption, config), "instead", f"{why}: trained with the fixed caption"
    if policy == "folder":
        words = name_words(os.path.basename(os.path.dirname(path)))
        return (words,), "folder", f"{why}: trained with its folder's name, {words!r}"
    if trigger:
        return (trigger,), "trigger", f"{why}: trained with the trigger word, {trigger!r}"
    words = name_words(stem_of(os.path.basename(path)))
    return (words,), "name", f"{why}: trained with its name's words, {words!r}"


def _beside(path: str, config: DatasetConfig, files: Sequence[str] | None) -> tuple[tuple[str, ...], str, str]:
    """Captions of the first good file, a warning about it; or why there is none."""
    why = "has no caption file"
    folder = os.path.dirname(path)
    for name in _candidates(path) if files is None else files:
        try:
            with open(long_path(os.path.join(folder, name)), "rb", buffering=0, opener=without_waiting) as f:
                large = os.fstat(f.fileno()).st_size > _MAX_BYTES
                raw = b"" if large else f.read()
        except FileNotFoundError:
            continue
        except OSError as error:
            why = f"has a caption file that cannot be read ({error.strerror or error})"
            continue
        if large:
            why = f"has a caption file of more than {_MAX_BYTES >> 20} MiB"
            continue
        text, doubt = decode(raw)
        found, is_json = [text], name.lower().endswith(".json")
        if is_json:
            try:
                found = texts_in(json.loads(text))
            except (ValueError, RecursionError) as error:
                why = f"has a caption file that is no valid JSON ({name}: {' '.join(str(error).split())[:100]})"
                continue
        texts = tuple(line for each in found for line in _lines(each, config))
        if texts:
            return texts, f"has a caption file that {doubt} ({name})" if doubt else "", ""
        why = f"has an empty caption file ({name})" if not doubt else f"has a caption file that {doubt} ({name})"
        if is_json:
            why = f"has a JSON file without a caption ({name}; looked for {', '.join(TEXT_KEYS[:5])} ...)"
    return (), "", why


def without_waiting(path: str, flags: int) -> int:
    """For ``open``: a pipe is empty rather than waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def stem_of(name: str) -> str:
    """The name of a file without its extension."""
    return name.rpartition(".")[0] or name


def _candidates(path: str) -> list[str]:
    names: list[str] = []
    own = os.path.basename(path)
    for extension in EXTENSIONS:
        for spelling in (extension, extension.upper(), extension.title()):
            names += [stem_of(own) + spelling, own + spelling]
    return [name for name in names if name != own]


def called_like(name: str, files: Mapping[str, Sequence[str]]) -> list[str]:
    """The caption files of a picture among those of its folder: ``files`` by their names without extension.

    ``a.png`` has ``a.txt``, else ``a.png.txt``, else those of the next extension.
    """
    found = [f for key in dict.fromkeys((stem_of(name), name)) for f in files.get(key, ()) if f != name]
    return sorted(found, key=lambda f: EXTENSIONS.index(f[f.rindex(".") :].lower()))


def texts_in(value: Any, key: str = "") -> list[str]:
    """The captions in what a JSON file holds: a text, a list of them, or an object with one under a usual key.

    A list is several captions, but a list of tags is one.
    """
    if isinstance(value, str):
        return [", ".join(value.split()) if key == "tag_string" else value] if value.strip() else []
    if isinstance(value, list):
        found = [text for each in value for text in texts_in(each, key)]
        return [", ".join(found)] if found and key in _TAG_KEYS else found
    if not isinstance(value, Mapping):
        return []
    if key in _TAG_KEYS:  # by kind, as some boards have them
        return texts_in([text for each in value.values() for text in texts_in(each, key)], key)
    named = {str(k).strip().lower(): v for k, v in value.items()}
    return next((found for k in TEXT_KEYS if (found := texts_in(named.get(k), k))), [])


def cut_off(captions: Iterable[tuple[str, Sequence[str]]], count: Callable[[str], int],
            limit: int) -> list[tuple[str, str]]:  # fmt: skip
    """A warning for each picture, of (name, captions), that has one with more tokens than ``limit``."""
    known: dict[str, int] = {}
    found = []
    for name, texts in captions:
        # A token stands for a byte at least, so that most texts need not be counted.
        for text in (text for text in texts if len(text.encode("utf-8")) + 2 > limit):
            if text not in known:
                known[text] = count(text)
        most = max((known.get(text, 0) for text in texts), default=0)
        if most > limit:
            found.append((name, f"has a caption of {most} tokens: {limit} are read, its end is cut off"))
    return found


def _lines(text: str, config: DatasetConfig) -> tuple[str, ...]:
    parts = text.splitlines() if config.caption_lines == "random" else [text]
    return tuple(line for line in map(join_lines, parts) if line)


def decode(raw: bytes) -> tuple[str, str]:
    """Text of a caption file, and a doubt about its encoding (empty if there is none).

    UTF-8, UTF-16 and UTF-32 with their marks, UTF-8 or UTF-16 without, else Windows-1252. What has zeros and is none
    of these is no text: empty.
    """
    for mark, encoding in _BOMS:
        if raw.startswith(mark):
            text = raw[len(mark) :].decode(encoding, errors="replace")
            doubt = f"begins as {encoding.upper()} and does not go on so: save it as UTF-8"
            return text, doubt if "\ufffd" in text else ""
    # Text in UTF-16: of Latin scripts every second byte is zero, and which one tells the byte order.
    even, odd = raw[::2].count(0), raw[1::2].count(0)
    zeros, wide = even + odd, "utf-16-be" if even > odd else "utf-16-le"
    attempts = [wide] if zeros * 4 >= max(len(raw), 1) else ["utf-8", *([wide] if zeros * 50 > len(raw) else [])]
    for encoding in (*attempts, "utf-8"):
        with contextlib.suppress(UnicodeDecodeError):
            doubt = "is read as UTF-16, though it has no mark: save it as UTF-8" if encoding == wide else ""
            return raw.decode(encoding), doubt
    if zeros:
        return "", "is no text"
    return raw.decode("cp1252", errors="replace"), "is not UTF-8: read as Windows-1252; save it as UTF-8"


def join_lines(text: str) -> str:
    """The text's lines joined by single spaces, without control characters and outer white space."""
    lines = (_CONTROLS.sub("", line).strip() for line in text.splitlines())
    return plain(" ".join(line for line in lines if line))


def plain(text: str) -> str:
    """``text`` with what is no character replaced: names of files may hold raw bytes, and JSON halves of characters."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        pass
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\ufffd", "?")


def name_words(name: str) -> str:
    """The words of a name without extension: ``red-circle_02`` gives ``red circle 02``."""
    name = plain(name)
    return " ".join(re.split(r"[\s_.\-]+", name)).strip() or name

"""Captions in a table beside the pictures: ``metadata.jsonl`` or CSV, as Hugging Face's ImageFolder has them."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .captions import TEXT_KEYS, decode, stem_of, texts_in, without_waiting
from .paths import long_path, shown

NAMES = ("metadata.jsonl", "metadata.csv", "captions.jsonl", "captions.csv", "captions.json")
"""What such tables are called, in any case."""
FILE_KEYS = ("file_name", "filename", "file", "image", "image_path", "image_file", "image_file_name", "path")
_MAX_BYTES = 256 << 20
_DELIMITERS = (",", ";", "\t", "|")


class Tables:
    """The rows of all tables of a dataset folder, by the pictures that they name."""

    def __init__(self) -> None:
        self._rows: dict[str, list[str]] = {}
        self._from: dict[str, str] = {}

    def read(self, folder: Path, relative: str, warn: Callable[[str, str], None]) -> None:
        """Add the table ``relative``, whose file names start from where it lies. What is wrong is warned of."""
        name = shown(relative)
        try:
            with open(long_path(folder / relative), "rb", opener=without_waiting) as f:
                raw = f.read(_MAX_BYTES + 1)
        except OSError as error:
            return warn(name, f"cannot be read ({error.strerror or error})")
        if len(raw) > _MAX_BYTES:
            return warn(name, f"is larger than {_MAX_BYTES >> 20} MiB and is not read: split it up by folders")
        text, doubt = decode(raw)
        if doubt:
            warn(name, doubt)
        try:
            rows, bad = _parsed(relative, text)
        except (ValueError, RecursionError, csv.Error) as error:
            return warn(name, f"is no table of captions ({' '.join(str(error).split())[:100]})")
        if bad:
            warn(name, f"has {len(bad)} rows without a file name or a caption (the first is row {bad[0]})")
        for file, texts in rows:
            key = _key(folder / os.path.dirname(relative), file)
            known = self._rows.setdefault(key, [])
            known += [text for text in texts if text not in known]
            self._from.setdefault(key, name)
        return None

    def of(self, path: str) -> list[str]:
        """The captions of a picture; empty: no table names it. A table may leave the extension out."""
        if self._rows:
            folder, name = os.path.split(path)
            for key in (_key(folder, name), _key(folder, stem_of(name))):
                if key in self._rows:
                    return self._rows[key]
        return []

    def unused(self, pictures: Iterable[str]) -> dict[str, list[str]]:
        """File names in each table that are no picture's."""
        if not self._rows:
            return {}
        split = map(os.path.split, pictures)
        known = {_key(folder, name) for folder, whole in split for name in (whole, stem_of(whole))}
        found: dict[str, list[str]] = {}
        for key, table in self._from.items():
            if key not in known:
                found.setdefault(table, []).append(shown(os.path.basename(key)))
        return found


def is_table(relative: str) -> bool:
    """Whether a file of this name may hold the captions of a folder."""
    return os.path.basename(relative).lower() in NAMES


def _key(folder: str | Path, file: str) -> str:
    return os.path.normcase(os.path.normpath(os.path.join(folder, file)))


def _parsed(relative: str, text: str) -> tuple[list[tuple[str, list[str]]], list[int]]:
    """(file, captions) of each row, and the numbers of the rows that lack either."""
    kind = os.path.splitext(relative)[1].lower()
    if kind == ".csv":
        records = _csv_records(text)
    elif kind == ".jsonl":
        records = [_json(line) for line in text.split("\n") if line.strip()]
    else:
        records = _objects(json.loads(text))
    rows, bad = [], []
    for number, record in enumerate(records, 1):
        file = next((str(record[k]) for k in FILE_KEYS if record.get(k)), "").strip() if record else ""
        texts = texts_in(record)
        if file and texts:
            rows.append((file if os.sep == "\\" else file.replace("\\", "/"), texts))
        else:
            bad.append(number)
    return rows, bad


def _json(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return _named(value) if isinstance(value, Mapping) else {}


def _named(record: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(k).strip().lower(): v for k, v in record.items()}


def _objects(value: Any) -> list[dict[str, Any]]:
    """Rows of one JSON document: a list of objects, or captions (or objects) by file name."""
    if isinstance(value, list):
        return [_named(row) if isinstance(row, Mapping) else {} for row in value]
    if not isinstance(value, Mapping):
        raise ValueError("neither a list nor an object")
    return [_named(row) | {"file_name": file} if isinstance(row, Mapping) else {"file_name": file, "caption": row}
            for file, row in value.items()]  # fmt: skip


def _csv_records(text: str) -> list[dict[str, Any]]:
    head = text.lstrip().splitlines()[:1]
    if not head:
        return []
    delimiter = max(_DELIMITERS, key=head[0].count)
    rows = list(csv.reader(io.StringIO(text.lstrip(), newline=""), delimiter=delimiter))
    names = [name.strip().lower() for name in rows[0]]
    if any(name in FILE_KEYS for name in names) and any(name in TEXT_KEYS for name in names):
        return [dict(zip(names, row, strict=False)) for row in rows[1:] if row]
    if len(names) == 2 and "." in names[0]:  # no header
        return [dict(zip(("file_name", "caption"), row, strict=False)) for row in rows if row]
    raise ValueError(f"its first row names no {FILE_KEYS[0]} and {TEXT_KEYS[2]} columns")

"""Which files make up a model: one file, a set of parts, or a folder as diffusers makes it. Without torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = (".safetensors", ".sft")
"""How files of the safetensors format end."""
_STEM = "diffusion_pytorch_model"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.safetensors|\.sft)")
_INDEX = re.compile(r".+\.safetensors\.index(\..+)?\.json")
_MOST_JSON = 64 * 2**20


@dataclass(frozen=True)
class Located:
    """Where a model's weights are, and what the files beside them say of it."""

    files: tuple[Path, ...]
    """Those that are there; empty: the folder or index names none."""
    missing: tuple[str, ...] = ()
    """Names of parts that should be there and are not."""
    pipeline: str = ""
    """``FluxPipeline``, ``FluxKontextPipeline``, ...: what ``model_index.json`` names."""
    network: str = ""
    """``FluxTransformer2DModel``, ``AutoencoderKL``, ...: what ``config.json`` names."""
    quantized: str = ""
    """The method that ``config.json`` says the weights were quantized with."""


def weight_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that hold a model's weights, given itself, its folder, its index or one of its parts.

    Raises ``ValueError`` (one line) where that are none.
    """
    found = locate(Path(path)).files
    if not found:
        raise ValueError(f"{path} holds no .safetensors weights: choose a model's file, or a folder of one")
    return list(found)


def locate(path: Path) -> Located:
    """Find the weights of the model that ``path`` names. Raises ``OSError`` for a folder that cannot be listed."""
    if path.is_dir():
        folder = path
        if (path / "model_index.json").is_file() or not (_names(path) and any(map(_is_weights, _names(path)))):
            folder = path / "transformer" if (path / "transformer").is_dir() else path
        files, missing = _in_folder(folder)
        return Located(files, missing, _pipeline(folder, path), *_config(folder))
    files, missing = (path,), ()
    if _INDEX.fullmatch(path.name):
        files, missing = _in_index(path)
    elif part := _PART.fullmatch(path.name):
        files, missing = _siblings(path, part)
    if len(files) > 1 or missing or path.name.startswith(_STEM):
        return Located(files, missing, _pipeline(path.parent), *_config(path.parent))
    return Located(files)


def _in_folder(folder: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    names = _names(folder)
    indexes = sorted((n for n in names if _INDEX.fullmatch(n)), key=lambda n: (not n.endswith("rs.index.json"), n))
    weights = [n for n in names if _is_weights(n)]
    plain = [n for n in weights if not _PART.fullmatch(n)]
    for name in (f"{_STEM}.safetensors", *indexes, *(n for n in plain if n.startswith(_STEM))):
        if name in indexes:
            return _in_index(folder / name)
        if name in plain:
            return (folder / name,), ()
    first = next((n for n in weights if n not in plain), "")
    if part := _PART.fullmatch(first):
        return _siblings(folder / first, part)
    return ((folder / plain[0],), ()) if len(plain) == 1 else ((), ())  # of several models none is meant


def _in_index(index: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    table = _read(index).get("weight_map")
    named = sorted({str(v) for v in table.values()}) if isinstance(table, dict) else []
    return _there(index.parent, [n for n in named if os.path.basename(n) == n and "\0" not in n])


def _siblings(path: Path, part: re.Match[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    stem, number, count, suffix = part.groups()
    if not 1 <= int(number) <= int(count) <= 1000:
        return (path,), ()
    return _there(path.parent, [f"{stem}-{i:05d}-of-{count}{suffix}" for i in range(1, int(count) + 1)])


def _there(folder: Path, names: Sequence[str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    return (
        tuple(folder / n for n in names if (folder / n).is_file()),
        tuple(n for n in names if not (folder / n).is_file()),
    )


def _is_weights(name: str) -> bool:
    return name.lower().endswith(WEIGHTS)


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def _pipeline(*folders: Path) -> str:
    beside = [f / "model_index.json" for f in (*folders, *(f.parent for f in folders if f.name == "transformer"))]
    return next(filter(None, (_text(_read(p).get("_class_name")) for p in beside)), "")


def _config(folder: Path) -> tuple[str, str]:
    config = _read(folder / "config.json")
    architectures = config.get("architectures")
    named = config.get("_class_name") or (architectures[0] if isinstance(architectures, list) and architectures else "")
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else ""
    return _text(named), _text(method)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _read(path: Path) -> dict[str, Any]:
    """A small JSON object; empty where there is none, or nothing that can be read."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_JSON:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

"""Between files and the stages' arenas: weights in, full states out and in again, weights out.

A state folder holds one safetensors file for each stage (its flat tensors as they are, nothing
converted) and ``trainer.json`` with the counters. Everything streams in chunks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from .. import files
from ..config import LoraConfig
from ..files import Damaged
from ..flux.intake import open_source
from ..flux.variants import FileInfo
from ..memory.arena import CHUNK, Group, Piece, aligned
from ..memory.averaged import storage_of
from ..optim.base import averaged, load_master_, master
from ..walk import Stage
from ..weights import (
    Entry,
    NotSafetensors,
    TensorFile,
    Truncated,
    check_space,
    dtype_name,
    file_bytes,
    size_of,
)
from . import weights_only
from .masters import DTYPES, PART, Saved
from .savepoints import Source, verify

HANDS = 4
"""Files of a state that are written, or read, at once: while one of them is hashed, another moves."""
T = TypeVar("T")
R = TypeVar("R")
Read = Callable[[str, int, int], Tensor]
"""Gives the elements from one place to another of a parameter's flat values."""


def _groups(stages: Sequence[Stage]) -> Iterator[tuple[Stage, Group]]:
    for stage in stages:
        for group in stage.arena.groups:
            yield stage, group


def load_weights(stages: Sequence[Stage], path: str, info: FileInfo, loras: Sequence[LoraConfig] = ()) -> None:
    """Fill the arenas from a Flux's files, with LoRAs merged in.

    What bf16 cannot hold of a finer file, or of the sum with a LoRA, goes into the masters' residuals.
    """
    with open_source(path, info, loras) as source:
        _fill(stages, source.read)


def begin_anew(stages: Sequence[Stage], path: str, info: FileInfo, loras: Sequence[LoraConfig] = ()) -> None:
    """``load_weights`` into arenas that were trained: the optimizer's memory of that goes as well.

    ``Damaged`` where the files end, or cannot be read, when some of the arenas are filled.
    """
    with open_source(path, info, loras) as source:  # if it cannot be opened nothing has changed
        for _, group in _groups(stages):
            for tensor in group.storage.values():
                tensor.zero_()
        try:
            _fill(stages, source.read)
        except (NotSafetensors, Truncated, OSError) as error:
            raise Damaged(" ".join(str(error).split())) from None


def _fill(stages: Sequence[Stage], read: Read) -> None:
    """Have the masters of all parameters be what ``read`` gives."""
    for _, group in _groups(stages):
        for piece in group.pieces:
            numel = piece.parameter.numel()
            for start in range(0, numel, PART):
                values = read(piece.name, start, min(start + PART, numel)).float()
                place = slice(piece.start + start, piece.start + start + values.numel())
                load_master_(group.home["weight"][place], _residual(group, place), values)


def _residual(group: Group, place: slice) -> dict[str, Tensor]:
    """What makes the weights of these elements exact, beside themselves."""
    return {name: t[place] for name, t in group.storage.items() if name == "residual"}


def export_entries(stages: Sequence[Stage], dtype: str, *, ema: bool = False) -> list[Entry]:
    """Every parameter under its own name, cast from its exact master to ``dtype`` (``bf16``, ``f16``, ``f32``).

    ``ema``: from the running average of it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
    return [
        Entry(piece.name, dtype_name(DTYPES[dtype]), tuple(piece.parameter.shape), partial(_masters, group, piece, ema))
        for _, group in _groups(stages)
        for piece in group.pieces
    ]


def _masters(group: Group, piece: Piece, ema: bool) -> Iterator[Tensor]:
    end = piece.start + piece.parameter.numel()
    for start in range(piece.start, end, PART):
        place = slice(start, min(start + PART, end))
        if not ema:
            yield master(group.current[place].cpu(), _residual(group, place))
            continue
        whole = slice(start, aligned(place.stop))
        storage = storage_of(group, whole.start, whole.stop)
        yield averaged(group.current[whole].cpu(), storage)[: place.stop - place.start]


def _state_tensors(group: Group) -> dict[str, Tensor]:
    return {f"{group.label}.weight": group.current, **{f"{group.label}.{k}": t for k, t in group.storage.items()}}


def _layout(stage: Stage) -> str:
    """What the flat tensors of a stage mean: names, sizes and places."""
    return json.dumps([[p.name, list(p.parameter.shape), p.start] for g in stage.arena.groups for p in g.pieces])


def _labels(stage: Stage) -> str:
    """In which group each parameter of the layout is."""
    return json.dumps([g.label for g in stage.arena.groups for _ in g.pieces])


def _chunks(flat: Tensor) -> Iterator[Tensor]:
    flat = flat.flatten()
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK].cpu()


def save_state(stages: Sequence[Stage], directory: Path, counters: Mapping[str, int]) -> dict[str, str]:
    """Write weights, residuals, moments and ``counters`` into ``directory``, which exists; all is on the disk then.

    Returns the SHA-256 of each file, hashed beside the writing. Raises ``DiskFull`` before anything is written if there
    is no room for all of it, and ``OSError`` for what happens on the way.
    """
    parts: list[tuple[Path, list[Entry], dict[str, str]]] = []
    for stage in stages:
        tensors = {k: t for group in stage.arena.groups for k, t in _state_tensors(group).items()}
        entries = [Entry(k, dtype_name(t.dtype), tuple(t.shape), partial(_chunks, t)) for k, t in tensors.items()]
        about = {"layout": _layout(stage), "groups": _labels(stage)}
        parts.append((directory / f"{stage.name}.safetensors", entries, about))
    # The folder has a name for the time being; the one that it lies in is known to the user.
    check_space(directory.parent, sum(size_of(entries, about) for _, entries, about in parts))
    hashes = _all_at_once(lambda part: _write(part[0], file_bytes(*part[1:])), parts)
    written = {path.name: hashed for (path, *_), hashed in zip(parts, hashes, strict=True)}
    told = json.dumps({**counters, "stages": [s.name for s in stages]}).encode()
    return {**written, "trainer.json": _write(directory / "trainer.json", [told])}


def state_bytes(stages: Sequence[Stage]) -> int:
    """Bytes of the tensors that ``save_state`` writes."""
    return sum(t.nbytes for _, group in _groups(stages) for t in _state_tensors(group).values())


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Make a file of the parts, on the disk when this returns, and return its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for part in parts:
            files.write(file, part)
            digest.update(part)
        files.sync(file)
        files.forget(file)
    return digest.hexdigest()


def _all_at_once(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of all items, ``HANDS`` at a time. What one raises keeps those that have not begun from it."""
    with ThreadPoolExecutor(HANDS, "save point") as pool:
        return list(pool.map(work, items))


def load(stages: Sequence[Stage], source: Path | Source) -> tuple[int, int]:
    """Fill the arenas, which are parked; returns the step and the step after which the moments were zero.

    A folder is taken as ``save_state`` wrote it. Of a ``fresh`` source only the weights are taken, whatever optimizer
    wrote them; the moments become zero. Raises ``Damaged`` where a file is not what was written, which may be noticed
    when some of the arenas are filled; ``ValueError`` where it does not fit, when nothing has changed.
    """
    source = Source(0, source) if isinstance(source, Path) else source
    if source.path.is_dir() and not source.fresh:
        return _load_state(stages, source)
    try:
        if source.path.is_dir():
            if wrong := verify(source.path):
                raise Damaged(wrong[0])
            saved = Saved(source.path)
            _begin_anew(stages, saved.read, saved.shapes)
        else:
            if wrong := weights_only.verify(source.path):
                raise Damaged(wrong[0])
            with TensorFile(source.path) as file:
                _begin_anew(stages, file.read, {name: t.shape for name, t in file.tensors.items()})
    except (NotSafetensors, Truncated, OSError) as error:
        raise Damaged(str(error)) from None
    return source.step, source.step


def _begin_anew(stages: Sequence[Stage], read: Read, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for _, group in _groups(stages):
        for piece in group.pieces:
            if shapes.get(piece.name) != tuple(piece.parameter.shape):
                raise ValueError(f"the weights do not fit this run: {piece.name} is {shapes.get(piece.name)} in them;"
                                 " continue with the model they were made with")
    for _, group in _groups(stages):
        for tensor in group.storage.values():
            tensor.zero_()
    _fill(stages, read)


def _load_state(stages: Sequence[Stage], source: Source) -> tuple[int, int]:
    paths = {stage.name: source.path / f"{stage.name}.safetensors" for stage in stages}
    try:
        counters = _counters(source)
        for stage in stages:
            _check(stage, paths[stage.name], source)
        _all_at_once(lambda stage: _read_stage(stage, paths[stage.name], source), stages)
        return counters["step"], counters.get("since", 0)
    except (NotSafetensors, Truncated, OSError) as error:
        raise Damaged(" ".join(str(error).split())) from None


def _counters(source: Source) -> dict[str, int]:
    path = source.path / "trainer.json"
    hashed = files.sha256(path)
    if source.sha256.get(path.name, hashed) != hashed:
        raise Damaged(f"{path} is not as it was written: its disk is failing")
    try:
        counters = files.read_json(path)
        return {name: int(counters[name]) for name in ("step", "since") if name in counters or name == "step"}
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def _read_stage(stage: Stage, path: Path, source: Source) -> None:
    targets = {name: t for group in stage.arena.groups for name, t in _state_tensors(group).items()}
    with TensorFile(path) as file:
        hashed = file.read_all_(targets)
        for name in set(targets) - set(file.tensors):
            targets[name].zero_()
    if source.sha256.get(path.name, hashed) != hashed:
        raise Damaged(f"{path} is not as it was written: its disk or its memory is failing")


def _parameters(layout: str | None) -> dict[str, list[int]]:
    """The shape of each parameter, wherever it lies; none where that cannot be read."""
    try:
        return {name: shape for name, shape, _ in json.loads(layout or "[]")}
    except (ValueError, TypeError):
        return {}


def _check(stage: Stage, path: Path, source: Source) -> None:
    """Raise ``ValueError`` unless the file holds what the stage's arena does (a running average may come or go)."""
    wrong = f"save point {source.path.name} does not fit this run ({path.name}): "
    tensors = {name: t for group in stage.arena.groups for name, t in _state_tensors(group).items()}
    want = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
    with TensorFile(path) as file:
        have, layout = {n: (t.dtype, t.shape) for n, t in file.tensors.items()}, file.header.metadata.get("layout")
    own = _layout(stage)
    if _parameters(layout) != _parameters(own):
        wrong += "it holds other parameters; continue with the model it was made with"
    elif layout != own or any(want.get(name) != have.get(name) for name in want | have if ".ema" not in name):
        wrong += "it was written with another optimizer, state format or weight precision; set them back to continue"
    else:
        return
    if source.sha256.get(path.name, "") not in ("", files.sha256(path)):
        raise Damaged(f"{path} is not as it was written: its disk is failing")
    raise ValueError(wrong)

"""Between files and the stages' arenas: weights in, full states out and in again, weights out.

A state folder holds one safetensors file for each stage (its flat tensors as they are, nothing
converted) and ``trainer.json`` with the counters. Everything streams in chunks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .flux.variants import FileInfo
from .memory.arena import CHUNK, Group, Piece
from .optim.base import load_master_, master
from .walk import Stage
from .weights import Entry, TensorFile, check_space, dtype_name, read_header, write_safetensors

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""The precisions of an export."""


def _groups(stages: Sequence[Stage]) -> Iterator[tuple[Stage, Group]]:
    for stage in stages:
        for group in stage.arena.groups:
            yield stage, group


def load_weights(stages: Sequence[Stage], path: str, info: FileInfo) -> None:
    """Fill the arenas from a Flux file; what bf16 cannot hold of a finer file goes into the masters' residuals."""
    with TensorFile(path) as file:
        for _, group in _groups(stages):
            for piece in group.pieces:
                name, numel = info.tensor_name(piece.name), piece.parameter.numel()
                for start in range(0, numel, CHUNK):
                    values = file.read(name, start, min(start + CHUNK, numel)).float()
                    place = slice(piece.start + start, piece.start + start + values.numel())
                    load_master_(group.home["weight"][place], _residual(group, place), values)


def _residual(group: Group, place: slice) -> dict[str, Tensor]:
    """What makes the weights of these elements exact, beside themselves."""
    return {name: t[place] for name, t in group.storage.items() if name == "residual"}


def export_entries(stages: Sequence[Stage], dtype: str) -> list[Entry]:
    """Every parameter under its own name, cast from its exact master to ``dtype`` (``bf16``, ``f16``, ``f32``)."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
    return [
        Entry(piece.name, dtype_name(DTYPES[dtype]), tuple(piece.parameter.shape), partial(_masters, group, piece))
        for _, group in _groups(stages)
        for piece in group.pieces
    ]


def _masters(group: Group, piece: Piece) -> Iterator[Tensor]:
    end = piece.start + piece.parameter.numel()
    for start in range(piece.start, end, CHUNK):
        place = slice(start, min(start + CHUNK, end))
        yield master(group.current[place].cpu(), _residual(group, place))


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


def save_state(stages: Sequence[Stage], directory: Path, *, step: int, rollbacks: int) -> None:
    """Write weights, residuals, moments and counters into ``directory``, which exists.

    Raises ``weights.DiskFull`` before anything is written if there is no room for all of it.
    """
    files: list[tuple[Stage, list[Entry]]] = []
    for stage in stages:
        tensors = {k: t for group in stage.arena.groups for k, t in _state_tensors(group).items()}
        entries = [Entry(k, dtype_name(t.dtype), tuple(t.shape), partial(_chunks, t)) for k, t in tensors.items()]
        files.append((stage, entries))
    # The folder has a name for the time being; the one that it lies in is known to the user.
    check_space(directory.parent, sum(e.nbytes for _, entries in files for e in entries))
    for stage, entries in files:
        about = {"layout": _layout(stage), "groups": _labels(stage)}
        write_safetensors(directory / f"{stage.name}.safetensors", entries, about)
    with open(directory / "trainer.json", "w", encoding="utf-8") as file:
        json.dump({"step": step, "rollbacks": rollbacks, "stages": [s.name for s in stages]}, file)
        file.flush()
        os.fsync(file.fileno())


def load_state(stages: Sequence[Stage], directory: Path) -> int:
    """Fill the arenas, which are parked, from what ``save_state`` wrote and return its step.

    All is checked before anything is changed.
    """
    counters = json.loads((directory / "trainer.json").read_text(encoding="utf-8"))
    files = [(stage, directory / f"{stage.name}.safetensors") for stage in stages]
    for stage, path in files:
        _check(stage, path)
    for stage, path in files:
        with TensorFile(path) as file:
            for group in stage.arena.groups:
                for name, tensor in _state_tensors(group).items():
                    file.read_into_(name, tensor)
    return int(counters["step"])


def saved_entries(directory: Path, dtype: str) -> list[Entry]:
    """``export_entries`` of the state in ``directory``, read from its files chunk by chunk.

    ``ValueError`` for a dtype that is none, and for a state that an older version wrote.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
    entries = []
    counters = json.loads((directory / "trainer.json").read_text(encoding="utf-8"))
    for stage in counters["stages"]:
        path = directory / f"{stage}.safetensors"
        about = read_header(path).metadata
        if "groups" not in about:
            raise ValueError(f"save point {directory.name} is of an older version: train the run a step, then export")
        for (name, shape, start), group in zip(json.loads(about["layout"]), json.loads(about["groups"]), strict=True):
            chunks = partial(_saved_masters, path, group, start, start + math.prod(shape))
            entries.append(Entry(name, dtype_name(DTYPES[dtype]), tuple(shape), chunks))
    return entries


def _saved_masters(path: Path, group: str, start: int, end: int) -> Iterator[Tensor]:
    with TensorFile(path) as file:
        for first in range(start, end, CHUNK):
            place = first, min(first + CHUNK, end)
            residual = f"{group}.residual"
            storage = {"residual": file.read(residual, *place)} if residual in file.tensors else {}
            yield master(file.read(f"{group}.weight", *place), storage)


def _check(stage: Stage, path: Path) -> None:
    wrong = f"save point {path.parent.name} does not fit this run ({path.name}): "
    with TensorFile(path) as file:
        if file.header.metadata.get("layout") != _layout(stage):
            raise ValueError(wrong + "it holds other parameters; continue with the model it was made with")
        want = {
            k: (dtype_name(t.dtype), tuple(t.shape))
            for group in stage.arena.groups
            for k, t in _state_tensors(group).items()
        }
        have = {name: (t.dtype, t.shape) for name, t in file.tensors.items()}
        if want != have:
            raise ValueError(
                wrong + "it was written with another optimizer, state format or weight precision; "
                "set them back to continue"
            )

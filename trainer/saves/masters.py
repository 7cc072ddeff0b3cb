"""The exact weights in a save point's folder, read parameter by parameter, without an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .. import files
from ..memory.arena import aligned
from ..optim.average import AVERAGE
from ..optim.base import BLOCK, PER_BLOCK, averaged, master
from ..weights import Entry, TensorFile, dtype_name, read_header

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""The precisions of an export."""
PART = 1 << 20
"""Elements of exact weights that are made at once: it takes several float32 copies of them to make them."""


def saved_entries(directory: Path, dtype: str, *, ema: bool = False) -> list[Entry]:
    """``checkpoint.export_entries`` of the state in ``directory``, read from its files chunk by chunk.

    ``ValueError`` for a dtype that is none, a state that an older version wrote, or one without the average (``ema``).
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
    saved = Saved(directory, ema=ema)
    return [Entry(name, dtype_name(DTYPES[dtype]), shape, partial(saved.chunks, name))
            for name, shape in saved.shapes.items()]


class Saved:
    """The exact masters in a state folder, or (``ema``) their running averages, by parameter.

    ``ValueError`` for a state that an older version wrote, or that has no averages.
    """

    def __init__(self, directory: Path, *, ema: bool = False) -> None:
        self._ema = ema
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[Path, str, int]] = {}
        for stage in files.read_json(directory / "trainer.json")["stages"]:
            path = directory / f"{stage}.safetensors"
            header = read_header(path)
            about = header.metadata
            if "groups" not in about:
                raise ValueError(f"save point {directory.name} is of an older version: train the run a step first")
            layout, groups = json.loads(about["layout"]), json.loads(about["groups"])
            if ema and f"{groups[0]}.{AVERAGE}" not in header.tensors:
                raise ValueError(f"save point {directory.name} holds no average of the weights: set ema_decay in the"
                                 " recipe and train on, or choose the weights themselves")
            for (name, shape, start), group in zip(layout, groups, strict=True):
                self.shapes[name], self._places[name] = tuple(shape), (path, group, start)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` (a multiple of 256) to ``stop`` of a parameter, flat, in float32."""
        path, group, first = self._places[name]
        first, last = first + start, first + aligned(stop)
        with TensorFile(path) as file:
            residual, scale = f"{group}.residual", f"{group}.{AVERAGE}{PER_BLOCK}"
            storage = {"residual": file.read(residual, first, last)} if residual in file.tensors else {}
            weight = file.read(f"{group}.weight", first, last)
            if not self._ema:
                return master(weight, storage)[: stop - start]
            storage[AVERAGE] = file.read(f"{group}.{AVERAGE}", first, last)
            if scale in file.tensors:
                storage[AVERAGE + PER_BLOCK] = file.read(scale, first // BLOCK, last // BLOCK)
            return averaged(weight, storage)[: stop - start]

    def chunks(self, name: str) -> Iterator[Tensor]:
        """All elements of a parameter, in order."""
        numel = math.prod(self.shapes[name])
        return (self.read(name, start, min(start + PART, numel)) for start in range(0, numel, PART))

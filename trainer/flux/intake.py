"""The weights that a training begins with, read slice by slice: whatever names and files they come in, LoRAs added.

No more than the asked-for slice of one tensor is in memory, in float32, and what a LoRA adds to it.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import LoraConfig
from ..weights import TensorFile
from .folders import weight_files
from .info import FileInfo
from .lora import Change, read_lora
from .sizes import shapes_of

log = logging.getLogger(__name__)


def open_source(path: str | os.PathLike[str], info: FileInfo, loras: Sequence[LoraConfig] = ()) -> Source:
    """The weights of the Flux at ``path``, which ``variants.require_flux`` said is ``info``, with LoRAs merged in.

    Use it in a ``with``. Raises ``ValueError`` (one line) where a LoRA does not fit.
    """
    return Source(path, info, loras)


class Source:
    """A Flux's parameters by Black Forest Labs' names. Close it, or use it in a ``with``."""

    def __init__(self, path: str | os.PathLike[str], info: FileInfo, loras: Sequence[LoraConfig]) -> None:
        assert info.flux is not None, info.reason
        self.info, self.shapes = info, shapes_of(info.flux)
        self._files: list[TensorFile] = []
        self._merges: list[_Merge] = []
        try:
            for part in weight_files(path):
                self._files.append(TensorFile(part))
            for lora in loras:
                if lora.strength:
                    self._merges.append(_Merge(lora, info))
        except BaseException:
            self.close()
            raise
        self._where = {name: file for file in self._files for name in file.tensors}

    def close(self) -> None:
        for file in self._files:
            file.close()
        for merge in self._merges:
            merge.file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` (the end, if None) of a parameter, flat, in float32.

        Raises ``ValueError`` where the file has changed since it was looked at, or a LoRA is not finite.
        """
        shape = self.shapes[name]
        width = math.prod(shape[1:])
        stop = math.prod(shape) if stop is None else stop
        out = torch.empty(stop - start, dtype=torch.float32)
        at = 0
        for rows in self.info.rows(name, shape):
            low, high = max(start, at), min(stop, at + (rows.stop - rows.start) * width)
            if low < high:
                if rows.name not in self._where:
                    raise ValueError(f"{self.info.path} has no tensor {rows.name} any more: choose the file again")
                first = rows.start * width + low - at
                self._where[rows.name].read_into_(rows.name, out[low - start : high - start], first)
            at += (rows.stop - rows.start) * width
        for merge in self._merges:
            merge.add_(name, width, start, out)
        return out


class _Merge:
    """One LoRA, open, and what it adds to each parameter."""

    def __init__(self, config: LoraConfig, info: FileInfo) -> None:
        assert info.flux is not None
        lora = read_lora(config.path, info.flux)
        self.strength = config.strength
        self.file = TensorFile(config.path)
        self.changes: dict[str, list[Change]] = defaultdict(list)
        for change in lora.changes:
            self.changes[change.parameter].append(change)
        ignored = f"; its {lora.ignored} tensors for text encoders are left out" if lora.ignored else ""
        log.info(
            "lora %s is merged at %g into %d parameters%s", config.path, config.strength, len(self.changes), ignored
        )

    def add_(self, name: str, width: int, start: int, out: Tensor) -> None:
        """Add the changes of a parameter with rows of ``width`` elements to its elements from ``start`` on."""
        stop = start + out.numel()
        for change in self.changes.get(name, ()):
            low = max(change.start, start // width)
            high = min(change.start + change.rows, -(-stop // width))
            if low >= high:
                continue
            first = change.first + low - change.start
            added = self._rows(change, first, first + high - low).reshape(-1)
            begin, end = max(start, low * width), min(stop, high * width)
            out[begin - start : end - start] += self.strength * added[begin - low * width : end - low * width]

    def _rows(self, change: Change, first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` of a change, in float32, scaled as its alpha says."""
        if change.kind == "diff":
            return self._slice(change.tensors["diff"], first, last)
        if change.kind == "lokr":
            return self._kronecker(change, first, last)
        pairs = (("up", "down"),) if change.kind == "lora" else (("w1_a", "w1_b"), ("w2_a", "w2_b"))
        added, rank = None, 1
        for left, right in pairs:
            down = self._slice(change.tensors[right])
            product = self._slice(change.tensors[left], first, last) @ down
            added, rank = product if added is None else added * product, down.shape[0]
        assert added is not None
        return added * self._alpha(change, rank)

    def _kronecker(self, change: Change, first: int, last: int) -> Tensor:
        """Row ``a * C + c`` of the Kronecker product of w1 and w2 [C, D] is row a of w1 times row c of w2."""
        sides, scale = [], 1.0
        for w in ("w1", "w2"):
            if w in change.tensors:
                sides.append(self._slice(change.tensors[w]))
            else:
                left, right = (self._slice(change.tensors[f"{w}_{side}"]) for side in "ab")
                sides.append(left @ right)
                scale = self._alpha(change, right.shape[0])
        row = torch.arange(first, last)
        w1, w2 = sides[0][row // len(sides[1])], sides[1][row % len(sides[1])]
        return scale * (w1[:, :, None] * w2[:, None, :]).flatten(1)

    def _alpha(self, change: Change, rank: int) -> float:
        if "alpha" not in change.tensors:
            return 1.0
        return float(self.file.read(change.tensors["alpha"])[0]) / rank

    def _slice(self, key: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows of a tensor as a float32 matrix (a column, if it is flat)."""
        shape = self.file.tensors[key].shape
        width = math.prod(shape[1:])
        last = shape[0] if last is None else last
        found = self.file.read(key, first * width, last * width).float().view(last - first, width)
        if not bool(found.isfinite().all()):
            raise ValueError(f"lora {self.file.path} has numbers that are not finite ({key}): choose another file")
        return found

"""Scaled fp8 as ComfyUI loads it, old versions and new ones.

The file has ``scaled_fp8`` (an fp8 tensor of two elements: products are made in full precision, only the weights are
small), and beside each fp8 matrix ``X.weight`` its ``X.scale_weight``, a float32 scalar; weight = fp8 * scale. ComfyUI
0.3.64 reads just that (``comfy.ops.scaled_fp8_ops``); newer ones turn it into ``X.weight_scale`` and ``X.comfy_quant``
(``comfy.utils.convert_old_quants``, 0.33.0). 0.3.64 holds all linear layers of such a file in fp8, biases too, and
casts what is finer (and warns that those have no scale).

What stays bf16 was measured on the trained demo, as the error of the velocity: 3.8 % as it is, 5.0 % with the layers
before and after the blocks in fp8 too (0.5 % less to store), 3.2 % with the modulation in bf16 (a quarter more), 6.2 %
for a bare cast; bf16 0.4 %. At FLUX.1's width, with random weights: 3.1 % in 0.33.0, 6.4 % in 0.3.64.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..weights import Entry

FP8 = "F8_E4M3"
MARKER = "scaled_fp8"
SCALE = ".scale_weight"
LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
_BLOCKS = ("double_blocks.", "single_blocks.")


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor becomes fp8: the matrices of the blocks, 99 % of a Flux. What is before and after them (inputs,
    embedders, the final layer), biases and norms stay bf16: they are small, and all of the picture passes them."""
    return len(shape) == 2 and name.endswith(".weight") and name.startswith(_BLOCKS)


def scaled_entries(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of a scaled fp8 file, from those of a Flux whose chunks are exact.

    Each matrix is read twice: for its largest number, then to be rounded. ``ValueError`` where one is not finite.
    """
    made = [Entry(MARKER, FP8, (2,), lambda: iter((torch.zeros(2).to(torch.float8_e4m3fn),)))]
    for e in entries:
        if is_quantized(e.name, e.shape):
            scale = functools.cache(functools.partial(_scale, e))
            made.append(Entry(e.name.removesuffix(".weight") + SCALE, "F32", (), lambda s=scale: iter((s(),))))
            made.append(dataclasses.replace(e, dtype=FP8, chunks=functools.partial(_rounded, e, scale)))
        else:
            made.append(dataclasses.replace(e, dtype="BF16"))
    return made


def _scale(e: Entry) -> Tensor:
    """What the largest number of a matrix is divided by to become that of fp8 (0-d float32)."""
    largest = torch.stack([chunk.float().abs().max() for chunk in e.chunks()]).max()
    if not torch.isfinite(largest):
        raise ValueError(f"{e.name} has values that are not finite: go back to an earlier save point")
    scale = largest / LARGEST  # zero for a matrix of zeros, and for one of numbers that are next to nothing
    return scale if scale > 0 else torch.ones(())


def _rounded(e: Entry, scale) -> Iterator[Tensor]:
    for chunk in e.chunks():
        yield (chunk.float() / scale()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

"""The running average of the weights, kept as its difference from them.

The difference follows from the same pass that updates the weights: ``D' = decay * (D + old - new)``, where old and new
are the exact masters. It is as small as what the weights moved by lately, so 16 bits hold it far more finely than they
would hold the average itself. It is rounded at random (counted, as all rounding here): to nearest, a slow average
would stop where its steps became smaller than half a code's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import FORMATS, PER_BLOCK, Format, Layout, Storage, rows_of
from .rounding import BLOCK, Noise, put_, words

AVERAGE = "ema"
"""Name of the difference among a stage's storage."""
AVERAGE_FORMATS = ("fixed16", "f32")
_LOWEST = 32
"""The exponent (biased by 126) that a block of zeros has: less than 2^-94 is not told from nothing."""


class Fixed16(Format):
    """Whole numbers of 16 bits times a power of two for each 256: the block's largest has 15 bits, or 14.

    The differences of neighbours are of one size (Adam moves all weights alike), so that a common unit loses less than
    a sign, an exponent and fewer digits would. At a decay of 0.9999 the error stays about a thousandth of the block's
    largest. Integers and powers of two only: every device writes the same codes.
    """

    signed_noise = True

    def layout(self, name: str, numel: int, signed: bool) -> Layout:
        rows = rows_of(numel)
        return {name: (torch.int16, (rows * BLOCK,)), name + PER_BLOCK: (torch.int32, (rows,))}

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        unit = (storage[name + PER_BLOCK] + (_LOWEST - 14)).bitwise_left_shift_(23).view(torch.float32)
        return storage[name].to(torch.float32).mul_(unit.view(-1, 1))

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        assert noise is not None
        top = value.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(1, keepdim=True)
        # What would round up to 32768 gets the next unit: nothing is cut off.
        exponent = top.add_(511).bitwise_right_shift_(23).clamp_(min=_LOWEST)
        fine = (value * (283 - exponent).bitwise_left_shift_(23).view(torch.float32)).to(torch.int32)
        codes = words(noise, stream).bitwise_right_shift_(17).add_(0x4000).add_(fine).bitwise_right_shift_(15)
        put_(storage[name], codes, ok)
        put_(storage[name + PER_BLOCK], (exponent - _LOWEST).view(-1), ok)


STORED: dict[str, Format] = {**FORMATS, "fixed16": Fixed16()}
"""Every format that storage can have: those of states, and that of the average."""


def decay_at(decay: float, step: int) -> float:
    """The decay of update ``step`` (from 1): less at first, or a short training would mostly average its beginning.

    ``(1 + step) / (10 + step)`` up to ``decay``, as diffusers and others have it.
    """
    return min(decay, (1 + step) / (10 + step))


def difference(storage: Storage, numel: int) -> Tensor:
    """What is to be added to the masters of ``numel`` flat weights to get their average: flat, float32."""
    ema = storage[AVERAGE]
    if ema.dtype == torch.float32:
        return ema
    rows = {AVERAGE: ema.view(-1, BLOCK), AVERAGE + PER_BLOCK: storage[AVERAGE + PER_BLOCK]}
    return STORED["fixed16"].decode(rows, AVERAGE, True).view(-1)[:numel]

"""How a bf16 weight keeps a float32 value: an exact split in two halves.

Everything here works on bit patterns with integer arithmetic, so that every device, chunk size and
compiler writes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The float32 master of a bf16 ``weight`` and its int16 ``residual`` (same shape), bit for bit. A new tensor."""
    high = weight.view(torch.int16).to(torch.int32)
    return torch.add(residual.to(torch.int32), high, alpha=1 << 16).view(torch.float32)


def split_(weight: Tensor, residual: Tensor, value: Tensor) -> None:
    """Write the float32 ``value`` into the bf16 ``weight`` (its nearest, ties away from zero) and ``residual``.

    ``hi = (bits + 0x8000) >> 16`` and ``residual = bits - (hi << 16)``: the difference fits 16 signed bits, so it is
    the low half of ``bits`` read as a signed number. Above the largest bf16 ``hi`` is infinity, and the sums
    wrap; ``join`` undoes both exactly.
    """
    bits = value.view(torch.int32)
    residual.copy_(bits)
    weight.view(torch.int16).copy_((bits + 0x8000).bitwise_right_shift_(16))

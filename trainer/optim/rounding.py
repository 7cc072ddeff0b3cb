"""Bits of float32 values kept in fewer bits: the exact split, and rounding whose randomness is counted.

Everything here is integer arithmetic on bit patterns, so that every device, chunk size and compiler
writes the same bits. Random words are a hash of (seed, step, element): nothing is drawn, so nothing depends
on the order of updates, and a resumed run goes on with the words it would have had.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 256
"""Elements per row. Parameters start on multiples of it; packed formats share a scale within it."""
STREAMS = 6
"""Independent words per element: one for each state of a rule, one for the weight and one for its average."""
WEIGHT_STREAM, AVERAGE_STREAM = 4, 5
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ODD = 0x2C1B3C6D
Noise = tuple[Tensor, Tensor]
"""One int32 hash per row, and the int32 table [STREAMS, 256] on the same device."""


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The float32 master of a bf16 ``weight`` and its int16 ``residual`` (same shape), bit for bit. A new tensor."""
    high = weight.view(torch.int16).to(torch.int32)
    return torch.add(residual.to(torch.int32), high, alpha=1 << 16).view(torch.float32)


def split_(weight: Tensor, residual: Tensor, value: Tensor, ok: Tensor | None = None) -> None:
    """Write the float32 ``value`` into the bf16 ``weight`` (its nearest, ties away from zero) and ``residual``.

    ``hi = (bits + 0x8000) >> 16`` and ``residual = bits - (hi << 16)``: the difference fits 16 signed bits, so it is
    the low half of ``bits`` read as a signed number. Above the largest bf16 ``hi`` is infinity, and the sums
    wrap; ``join`` undoes both exactly.
    """
    bits = value.view(torch.int32)
    put_(residual, bits, ok)
    put_(weight.view(torch.int16), (bits + 0x8000).bitwise_right_shift_(16), ok)


def nearest_(weight: Tensor, value: Tensor, ok: Tensor | None = None) -> None:
    """Write the float32 ``value`` into the bf16 ``weight``, rounded to nearest, ties to even."""
    put_(weight, value.to(torch.bfloat16), ok)


def stochastic_(out: Tensor, value: Tensor, noise: Noise, stream: int, ok: Tensor | None = None) -> None:
    """Write the float32 ``value`` [rows, 256] into the bf16 ``out``: up or down at random, right on average."""
    bits = words(noise, stream).bitwise_right_shift_(16).add_(0x8000).add_(value.view(torch.int32))
    put_(out.view(torch.int16), bits.bitwise_right_shift_(16), ok)


def put_(out: Tensor, value: Tensor, ok: Tensor | None) -> None:
    """``out = value`` in ``out``'s dtype (integers wrap), unless the 0-d bool ``ok`` is false."""
    if ok is None:
        out.copy_(value)
    else:
        out.copy_(torch.where(ok, value.to(out.dtype), out))


def words(noise: Noise, stream: int) -> Tensor:
    """A new int32 tensor [rows, 256], uniform over all bit patterns; the high bits are the good ones."""
    rows, table = noise
    return torch.bitwise_xor(rows.view(-1, 1), table[stream]).mul_(_ODD)


def noise_of(seed: int, step: int, rows: Sequence[range], device: torch.device) -> Noise:
    """The hashes of rows of 256 elements, by the numbers that they have among all that is trained."""
    base = _mix(_mix(_mix(seed)) ^ step)
    numbers = [torch.arange(r.start + 1, r.stop + 1, dtype=torch.int64, device=device) for r in rows]
    return _hashed(torch.cat(numbers) if len(numbers) > 1 else numbers[0], base), _table(device)


def rows_from(offset: int, numel: int) -> range:
    """Numbers of the rows that hold elements ``offset`` (a multiple of 256) to ``offset + numel``."""
    assert offset % BLOCK == 0, offset
    return range(offset // BLOCK, (offset + numel + BLOCK - 1) // BLOCK)


def _hashed(rows: Tensor, base: int) -> Tensor:
    rows.mul_(_signed(_GOLDEN)).add_(_signed(base))
    # splitmix64's finaliser. The shifts of signed numbers drag the sign along: mask it off.
    rows.bitwise_xor_((rows >> 30).bitwise_and_(2**34 - 1)).mul_(_signed(0xBF58476D1CE4E5B9))
    rows.bitwise_xor_((rows >> 27).bitwise_and_(2**37 - 1)).mul_(_signed(0x94D049BB133111EB))
    return (rows >> 32).to(torch.int32)


@functools.cache
def _table(device: torch.device) -> Tensor:
    values = [_mix(i * _GOLDEN) >> 32 for i in range(STREAMS * BLOCK)]
    table = torch.tensor(values, dtype=torch.int64, device=device)
    return table.to(torch.int32).view(STREAMS, BLOCK)


def _mix(x: int) -> int:
    """splitmix64 (Steele, Lea and Flood 2014) of a whole number."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x

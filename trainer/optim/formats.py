"""How optimizer states are kept: codecs between float32 and fewer bytes, on rows of 256 elements.

A state is one flat tensor of codes and, in some formats, parts beside it (``exp_avg.scale``, ...). All zero bytes
decode to zero. Values are finite and below 2^126; second moments (``signed=False``) are not negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from .rounding import BLOCK, Noise, put_, stochastic_, words

POWER_UNIT = 1 << 20
"""Elements that share a range in ``u16pow``."""
PER_BLOCK = ".scale"
"""Suffix of parts with one element per 256."""
PER_UNIT = ".range"
"""Suffix of parts with one row per ``POWER_UNIT`` elements."""
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Storage = Mapping[str, Tensor]


def rows_of(numel: int) -> int:
    """Rows of 256 that hold ``numel`` elements."""
    return -(-numel // BLOCK)


class Format:
    """One way of keeping a state. ``decode`` gives float32; ``encode_`` writes it back unless ``ok`` is false."""

    signed_noise: ClassVar[bool] = False
    """Whether first moments are rounded at random."""
    unsigned_noise: ClassVar[bool] = False
    """Whether second moments are."""
    unit: ClassVar[int] = BLOCK
    """Elements that must be encoded together."""

    def layout(self, name: str, numel: int, signed: bool) -> Layout:
        """Dtype and shape of each part that keeps ``numel`` elements."""
        raise NotImplementedError

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        """The state as a new float32 tensor [rows, 256]."""
        raise NotImplementedError

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        """Write the float32 ``value`` [rows, 256]."""
        raise NotImplementedError


class Float32(Format):
    """As it is: the update works on the storage itself, and only a guarded one on a copy."""

    def layout(self, name: str, numel: int, signed: bool) -> Layout:
        return {name: (torch.float32, (numel,))}

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        return storage[name]

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        if value is not storage[name]:
            put_(storage[name], value, ok)


class Float24(Format):
    """float32 without its lowest byte, rounded to nearest: 16 high bits, and 8 in a part of their own.

    Ties go to even: always upwards, they would add up to a bias in a slow average.
    """

    def layout(self, name: str, numel: int, signed: bool) -> Layout:
        size = (rows_of(numel) * BLOCK,)
        return {name: (torch.int16, size), name + ".low": (torch.uint8, size)}

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        high, low = storage[name].to(torch.int32), storage[name + ".low"].to(torch.int32)
        return low.add_(high, alpha=1 << 8).bitwise_left_shift_(8).view(torch.float32)

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        bits = value.view(torch.int32)
        odd = (bits >> 8).bitwise_and_(1)
        bits = odd.add_(bits).add_(0x7F).bitwise_right_shift_(8)
        put_(storage[name + ".low"], bits, ok)
        put_(storage[name], bits.bitwise_right_shift_(8), ok)


class BFloat16(Format):
    """The high half of float32, rounded at random: to nearest, a second moment could never decay."""

    signed_noise = unsigned_noise = True

    def layout(self, name: str, numel: int, signed: bool) -> Layout:
        return {name: (torch.bfloat16, (rows_of(numel) * BLOCK,))}

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        return storage[name].to(torch.float32)

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        assert noise is not None
        stochastic_(storage[name], value, noise, stream, ok)


class LogCode(Format):
    """Codes linear in the bit pattern of abs(x), a piecewise-linear logarithm, below the maximum of each 256.

    A bit pattern shifted right by ``shift`` is a whole number on one grid for all blocks. A code is that number less
    the block's ``base``, which puts the block's maximum at the highest code.

    - First moments: a sign bit and the distance from the base, to nearest. Below the base they are flushed to zero:
      kept there, a moment beside a second moment at its floor would step at full length.
    - Second moments: no sign, at random up or down (to nearest, a slow decay would stop), and never under
      the base: a second moment too small makes steps too long. A zero is kept as the base too, its moment being zero;
      in a block of zeros, or of numbers below the range, zeros stay zero.
    """

    unsigned_noise = True
    dtypes: ClassVar[tuple[torch.dtype, torch.dtype]] = (torch.int16, torch.int16)
    """Of codes of first and second moments."""
    bits: ClassVar[int] = 16
    """Per code."""
    shift: ClassVar[int] = 13
    """Bits of float32 that are left out."""

    def layout(self, name: str, numel: int, signed: bool) -> Layout:
        rows = rows_of(numel)
        dtype = self.dtypes[0 if signed else 1]
        return {name: (dtype, (rows * BLOCK,)), name + PER_BLOCK: (torch.int32, (rows,))}

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        codes, base = storage[name].to(torch.int32), storage[name + PER_BLOCK].view(-1, 1)
        if not signed:
            codes.bitwise_and_((1 << self.bits) - 1)
            return codes.add_(base).bitwise_left_shift_(self.shift).view(torch.float32)
        size = codes & self._top(signed)
        # The base only where there is something: addcmul with 0 or 1.
        bits = torch.addcmul(size, size.clamp(max=1), base).bitwise_left_shift_(self.shift)
        return bits.bitwise_or_(codes.bitwise_and_(-(2**31))).view(torch.float32)

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        bits, shift = value.view(torch.int32), self.shift
        if signed:
            size, spread = bits & 0x7FFFFFFF, 1 << (shift - 1)
        else:
            size, spread = bits, (1 << shift) - 1
        base = size.amax(1, keepdim=True).add_(spread).bitwise_right_shift_(shift).sub_(self._top(signed))
        origin = base << shift
        if signed:
            codes = size.sub_(origin.sub_(spread)).bitwise_right_shift_(shift).clamp_(min=0)
            codes.add_(bits >> 31, alpha=1 << (self.bits - 1))
        else:
            # A signed word has the mean -1/2 of a step: the half step that is added makes it 0 to 1.
            assert noise is not None
            codes = words(noise, stream).bitwise_right_shift_(32 - shift).add_(size)
            codes.sub_(origin.sub_(1 << (shift - 1))).bitwise_right_shift_(shift).clamp_(min=0)
        put_(storage[name], codes, ok)
        put_(storage[name + PER_BLOCK], base.view(-1), ok)

    def _top(self, signed: bool) -> int:
        return (1 << (self.bits - 1 if signed else self.bits)) - 1


class SmallCode(LogCode):
    """The same in 8 bits. Second moments are kept as distances of their root's bits from the block's maximum.

    With steps this coarse an average that is right leaves the median too low, as roundings multiply; rounding the root
    so that it is right on average keeps the median. The first 160 steps are sixteenths of an octave, the rest are
    eighths: fine where most of a block is, and a root 2^-21 of the greatest still has a code.
    """

    dtypes = (torch.int8, torch.uint8)
    bits = 8
    shift = 20
    _fine = 19
    _bend = 160 << 19

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        if signed:
            return super().decode(storage, name, signed)
        distance = storage[name].to(torch.int32).bitwise_left_shift_(self._fine)
        distance = torch.maximum(distance, (distance * 2).sub_(self._bend))
        root = (storage[name + PER_BLOCK].view(-1, 1) - distance).view(torch.float32)
        return root.square_()

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        if signed:
            return super().encode_(storage, name, value, signed, noise, stream, ok)
        assert noise is not None
        bits = value.sqrt().view(torch.int32)
        two_steps = 2 << self._fine
        top = bits.amax(1, keepdim=True).add_(two_steps - 1).bitwise_and_(-two_steps)
        distance = top - bits
        distance = torch.minimum(distance, (distance + self._bend).bitwise_right_shift_(1))
        distance.add_(words(noise, stream).bitwise_right_shift_(32 - self._fine)).add_(1 << (self._fine - 1))
        put_(storage[name], distance.bitwise_right_shift_(self._fine).clamp_(max=255), ok)
        put_(storage[name + PER_BLOCK], top.view(-1), ok)


class Power(Format):
    """The prototype's older code: sign(x) * abs(x)^(1/8), from its least to its greatest, as 0 to 65535, cut off.

    Kept for comparison. The prototype's range is that of the tensor; here it is that of each ``POWER_UNIT`` elements,
    so that a large tensor's update needs no second pass.
    """

    unit = POWER_UNIT

    def layout(self, name: str, numel: int, signed: bool) -> Layout:
        units = -(-numel // POWER_UNIT)
        return {name: (torch.int16, (rows_of(numel) * BLOCK,)), name + PER_UNIT: (torch.float32, (units, 2))}

    def decode(self, storage: Storage, name: str, signed: bool) -> Tensor:
        low, high = storage[name + PER_UNIT].unbind(1)
        root = storage[name].to(torch.int32).bitwise_and_(0xFFFF).to(torch.float32)
        root.mul_((high - low) / 65535).add_(low)
        value = root.square().square_().square_()
        return torch.copysign(value, root) if signed else value

    def encode_(
        self, storage: Storage, name: str, value: Tensor, signed: bool, noise: Noise | None, stream: int,
        ok: Tensor | None,
    ) -> None:  # fmt: skip
        assert value.numel() <= POWER_UNIT
        root = value.abs().sqrt_().sqrt_().sqrt_()
        if signed:
            root.copysign_(value)
        low, high = torch.aminmax(root)
        # Of equal values the difference is 0: whatever it is divided by, their code is 0 and decodes to them.
        step = ((high - low) / 65535).clamp_(min=1e-30)
        put_(storage[name], root.sub_(low).div_(step).clamp_(max=65535).to(torch.int32), ok)
        put_(storage[name + PER_UNIT], torch.stack((low, high)).view(1, 2), ok)


FORMATS: dict[str, Format] = {
    "f32": Float32(),
    "f24": Float24(),
    "log16": LogCode(),
    "u16pow": Power(),
    "bf16": BFloat16(),
    "int8": SmallCode(),
}
"""Every state format by name."""

"""The state codecs: what each keeps, for every kind of number it may be given."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.formats import measure
from trainer.optim.formats import FORMATS, POWER_UNIT, Format
from trainer.optim.rounding import BLOCK, noise_of, rows_from

CPU = torch.device("cpu")
NAMES = list(FORMATS)
RELATIVE = {"f32": 0.0, "f24": 2**-16, "log16": 2**-10, "u16pow": 0.02, "bf16": 2**-7, "int8": 0.27}
"""Largest error of a value near its block's maximum, relative to the value: a step where rounding is at random,
half a step where it is to nearest (``log16`` and ``int8`` first moments do better than this)."""
NEAREST = {"log16": 2**-11, "int8": 2**-4}
"""The same for first moments."""
BYTES = {"f32": 4, "f24": 3, "log16": 2 + 4 / 256, "u16pow": 2, "bf16": 2, "int8": 1 + 4 / 256}

SIZES = st.one_of(st.just(0.0), st.floats(2.0**-149, 2.0**126, width=32), st.floats(2.0**-40, 1.0, width=32))
FIRST = st.lists(st.builds(lambda x, s: x * s, SIZES, st.sampled_from([-1.0, 1.0])), min_size=1, max_size=600)
SECOND = st.lists(SIZES, min_size=1, max_size=600)


def keep(kind: Format, value: torch.Tensor, signed: bool, step: int = 1) -> torch.Tensor:
    """``value`` (flat, any length) encoded and decoded."""
    padded = torch.nn.functional.pad(value, (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    storage = storage_of(kind, padded.numel(), signed)
    noise = noise_of(1, step, [rows_from(0, padded.numel())], CPU)
    kind.encode_(storage, "x", padded.clone(), signed, noise, 0, None)
    return kind.decode(storage, "x", signed).reshape(-1)[: value.numel()].clone()


def storage_of(kind: Format, numel: int, signed: bool) -> dict[str, torch.Tensor]:
    layout = kind.layout("x", numel, signed)
    storage = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
    flat = {name: part for name, part in storage.items() if part.numel() == numel}
    return {**storage, **{name: part.view(-1, BLOCK) for name, part in flat.items()}}


def block_maxima(value: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(value, (0, -value.numel() % BLOCK)).view(-1, BLOCK).abs()
    return padded.amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)[: value.numel()]


def test_bytes_per_element() -> None:
    for name, kind in FORMATS.items():
        for signed in (True, False):
            layout = kind.layout("x", 1 << 24, signed)
            size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
            assert size / (1 << 24) == pytest.approx(BYTES[name], abs=1e-4)


def test_f24_rounds_to_nearest_and_ties_to_even() -> None:
    bits = torch.tensor([0x3F80007F, 0x3F800080, 0x3F800081, 0x3F800180, 0x3F8001FF], dtype=torch.int32)
    kept = keep(FORMATS["f24"], bits.view(torch.float32), False).view(torch.int32)
    assert kept.tolist() == [0x3F800000, 0x3F800000, 0x3F800100, 0x3F800200, 0x3F800200]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_fresh_storage_and_all_zero_tensors_are_zero(name: str, signed: bool) -> None:
    kind = FORMATS[name]
    assert not kind.decode(storage_of(kind, 512, signed), "x", signed).any()
    assert not keep(kind, torch.zeros(700), signed).any()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "u16pow"])
@given(values=FIRST)
@settings(deadline=None)
def test_first_moments_keep_sign_and_size(name: str, values: list[float]) -> None:
    value = torch.tensor(values, dtype=torch.float32)
    kept = keep(FORMATS[name], value, True)
    assert kept.isfinite().all()
    assert not (kept * value.sign() < 0).any()
    assert not kept[value == 0].any()
    # Far below the block's maximum, and below what float32 holds in full, there may be zeros.
    maxima = block_maxima(value)
    reach = {"log16": 2.0**-31, "int8": 2.0**-15}.get(name, 0.0)
    full = (value.abs() > maxima * reach) & (value.abs() > 2.0**-110)
    error = (kept.double() - value.double()).abs()
    assert (error[full] <= NEAREST.get(name, RELATIVE[name]) * value.abs().double()[full]).all()
    assert (error[~full] <= value.abs().double()[~full].clamp(min=2.0**-110)).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "u16pow"])
@given(values=SECOND, step=st.integers(1, 1000))
@settings(deadline=None)
def test_second_moments_stay_positive(name: str, values: list[float], step: int) -> None:
    value = torch.tensor(values, dtype=torch.float32)
    kept = keep(FORMATS[name], value, False, step)
    assert kept.isfinite().all() and not (kept < 0).any()
    maxima = block_maxima(value).double()
    floor = {"log16": 2.0**-63.9, "int8": 2.0**-43.7}.get(name, 0.0)
    full = (value > maxima * floor * 2) & (value > 2.0**-110)
    error = (kept.double() - value.double()).abs()
    assert (error[full] <= RELATIVE[name] * value.double()[full]).all()
    # What is too small for its block is raised to the floor and never above.
    limit = (maxima * floor * 3).clamp(min=2.0**-109)
    assert (kept.double()[~full] <= limit[~full]).all()
    if floor:
        assert (kept[(value > 0) & (maxima > 2.0**-60)] > 0).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_kept_is_kept_again(name: str, signed: bool) -> None:
    """Encoding what was decoded changes nothing: rounding does not creep. (The prototype's code does creep.)"""
    value = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 4096)
    kept = keep(FORMATS[name], value if signed else value.square(), signed)
    again = keep(FORMATS[name], kept, signed, step=2)
    if name == "u16pow":
        assert (again - kept).abs().sum() < 1e-2 * kept.abs().sum()
    else:
        assert torch.equal(kept, again)


@pytest.mark.parametrize("name", ["log16", "bf16", "int8"])
def test_second_moments_are_right_on_average(name: str) -> None:
    value = torch.exp(torch.randn(1024, generator=torch.Generator().manual_seed(0)))
    rounds = 400
    total = sum(keep(FORMATS[name], value, False, step).double() for step in range(1, rounds + 1))
    mean = total / rounds
    # 400 roundings of a step s have a standard error below s / 40; 5 of them, and none for the sum over elements.
    assert ((mean - value).abs() < 5 * RELATIVE[name] / 40 * value).all()
    assert abs(float(mean.sum() / value.sum() - 1)) < 5 * RELATIVE[name] / 40 / 32


def test_the_prototypes_code() -> None:
    """u16pow against the formula in float64: pow, linear over the range, cut off."""
    value = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = value.double()
    root = exact.sign() * exact.abs() ** 0.125
    low, high = root.min(), root.max()
    codes = ((root - low) / (high - low) * 65535).floor()
    root = codes / 65535 * (high - low) + low
    kept = keep(FORMATS["u16pow"], value, True)
    # float32 roots may fall to the other side of a step: 1/65535 of the range, 8 powers up.
    close = (kept.double() - root.sign() * root.abs() ** 8).abs() / exact.abs().clamp(min=1e-9)
    assert close.median() < 1e-4 and close.max() < 1e-2
    equal = torch.full((300,), -0.25)
    assert torch.allclose(keep(FORMATS["u16pow"], torch.cat((equal, torch.zeros(212) - 0.25)), True)[:300], equal)
    assert POWER_UNIT % BLOCK == 0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_false_guard_writes_nothing(name: str, signed: bool) -> None:
    kind = FORMATS[name]
    value = torch.rand(2, BLOCK) + 0.5
    noise = noise_of(0, 1, [range(2)], CPU)
    storage = storage_of(kind, 512, signed)
    kind.encode_(storage, "x", value.clone(), signed, noise, 0, torch.tensor(True))
    before = {part: tensor.clone() for part, tensor in storage.items()}
    kind.encode_(storage, "x", value * float("nan"), signed, noise, 0, torch.tensor(False))
    assert all(torch.equal(before[part], storage[part]) for part in storage)
    assert kind.decode(storage, "x", signed).sub(value).abs().max() < 0.3


def test_what_the_formats_do_to_moments() -> None:
    """A short form of ``benchmarks.formats``; the prototype's code and int8 are told from the others by it."""
    found = measure("dead", steps=300, numel=256 * 32)
    last = {name: entries[-1] for name, entries in found.items()}
    assert last["f32"]["m_error"] == 0
    assert last["f24"]["m_error"] < 1e-4 and abs(last["f24"]["sqrt_v_mean"]) < 1e-4
    assert last["log16"]["m_error"] < 1e-3 and abs(last["log16"]["sqrt_v_mean"]) < 2e-3
    assert abs(last["bf16"]["sqrt_v_mean"]) < 5e-3 and abs(last["int8"]["sqrt_v_median"]) < 2e-2
    assert all(entry["v_zeros"] == 0 for entry in last.values())
    assert last["u16pow"]["sqrt_v_mean"] < -2e-2 and last["int8"]["m_error"] > 1e-2

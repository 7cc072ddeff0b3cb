"""The flat interface: exact masters, slices that change no bit, gradients left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.optim import (
    AdamRule,
    AdanRule,
    UpdateSpec,
    finite,
    load_master_,
    make_storage,
    master,
    slice_storage,
    update_chunk_,
)
from trainer.optim.rounding import join, split_

RULES = {
    "nadam": AdamRule(nesterov=True, cautious=True, weight_decay=0.01),
    "adam": AdamRule(decoupled=False, weight_decay=0.01),
    "adan": AdanRule(weight_decay=0.01),
}


def spec_of(name: str) -> UpdateSpec:
    rule = RULES[name]
    return UpdateSpec(rule=rule, state_format=dict.fromkeys(rule.states, "f32"), seed=3)


BITS = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(BITS, min_size=1, max_size=64))
def test_split_and_join_are_exact_for_every_bit_pattern(patterns: list[int]) -> None:
    bits = torch.tensor(patterns, dtype=torch.int32)
    weight, residual = torch.empty(len(patterns), dtype=torch.bfloat16), torch.empty(len(patterns), dtype=torch.int16)
    split_(weight, residual, bits.view(torch.float32))
    assert torch.equal(join(weight, residual).view(torch.int32), bits)


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x00008000, 0x7FFF8000])
@pytest.mark.parametrize("sign", [0, -(2**31)])
def test_split_ties_and_overflow(bits: int, sign: int) -> None:
    value = torch.tensor([bits + sign], dtype=torch.int32)
    weight, residual = torch.empty(1, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int16)
    split_(weight, residual, value.view(torch.float32))
    assert torch.equal(join(weight, residual).view(torch.int32), value)
    if bits + 0x8000 < 2**31:
        assert int(weight.view(torch.int16)) & 0x7FFF == bits + 0x8000 >> 16


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=64))
def test_the_bf16_weight_is_the_masters_nearest(values: list[float]) -> None:
    value = torch.tensor(values, dtype=torch.float32)
    weight, residual = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    split_(weight, residual, value)
    nearest = value.to(torch.bfloat16)
    assert torch.equal((weight.double() - value.double()).abs(), (nearest.double() - value.double()).abs())


@pytest.mark.parametrize("name", list(RULES))
def test_a_split_step_is_the_float32_step_on_the_master(name: str) -> None:
    spec, numel = spec_of(name), 3000
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator)
    full, half = torch.empty(numel), torch.empty(numel, dtype=torch.bfloat16)
    full_storage, half_storage = (make_storage(spec, numel, weight.dtype) for weight in (full, half))
    load_master_(full, full_storage, start)
    load_master_(half, half_storage, start)
    for step in range(1, 30):
        grad = torch.randn(numel, generator=generator).to(torch.bfloat16)
        kept = grad.clone()
        for weight, storage in ((full, full_storage), (half, half_storage)):
            update_chunk_(spec, weight, grad, storage, lr=1e-5, step=step)
        assert torch.equal(grad, kept)
        assert torch.equal(master(half, half_storage), master(full, full_storage))
    assert (full != start).float().mean() > 0.99
    assert half_storage.keys() - full_storage.keys() == {"residual"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(RULES))
def test_slices_change_no_bit(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call, two engine slices or many small tiles: the same bits, ragged end included."""
    spec, numel = spec_of(name), 256 * 37 + 19
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(numel, generator=generator).to(dtype)
    grads = [torch.randn(numel, generator=generator) for _ in range(3)]

    def run(cuts: list[int], tile: int | None = None) -> dict[str, torch.Tensor]:
        if tile:
            monkeypatch.setattr("trainer.optim.base._tile_size", lambda *_: tile)
        weight, storage = start.clone(), make_storage(spec, numel, dtype)
        for step, grad in enumerate(grads, 1):
            for a, b in zip([0, *cuts], [*cuts, numel], strict=True):
                part = slice_storage(storage, a, b, numel)
                update_chunk_(spec, weight[a:b], grad[a:b], part, lr=1e-3, step=step, offset=a)
        return {"weight": weight, **storage}

    whole = run([])
    for other in (run([256 * 20]), run([], tile=512)):
        assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_an_empty_slice_is_fine() -> None:
    spec = spec_of("adan")
    weight = torch.empty(0)
    update_chunk_(spec, weight, weight, make_storage(spec, 0, weight.dtype), lr=1.0, step=1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**60, -1e30])
def test_finite_sees_what_would_spoil_a_state(bad: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.zeros(1000, dtype=dtype)
        assert bool(finite(grad))
        grad[777] = bad
        assert not bool(finite(grad))
    assert bool(finite(torch.empty(0)))

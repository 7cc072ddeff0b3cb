"""Counted rounding: uniform words that depend on nothing but (seed, step, element), and what is made of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.optim import AdamRule, AdanRule, UpdateSpec, formats_for, make_storage, slice_storage, update_chunk_
from trainer.optim.rounding import BLOCK, STREAMS, noise_of, rows_from, stochastic_, words

CPU = torch.device("cpu")
WHOLE = st.integers(0, 2**64 - 1)


def drawn(seed: int = 0, step: int = 1, offset: int = 0, numel: int = 1 << 16, stream: int = 0):
    return words(noise_of(seed, step, [rows_from(offset, numel)], CPU), stream)


@given(seed=WHOLE, step=st.integers(1, 10**7), rows=st.integers(0, 2**28))
def test_an_elements_word_is_its_own(seed: int, step: int, rows: int) -> None:
    """Wherever a chunk begins; and 12 billion elements count on without repeating."""
    whole = drawn(seed, step, rows * BLOCK, 4 * BLOCK)
    assert torch.equal(whole[2:], drawn(seed, step, (rows + 2) * BLOCK, 2 * BLOCK))
    swapped = words(noise_of(seed, step, [range(rows + 2, rows + 4), range(rows, rows + 2)], CPU), 0)
    assert torch.equal(swapped, torch.cat((whole[2:], whole[:2])))
    others = [drawn(seed ^ 1, step), drawn(seed, step + 1), drawn(seed, step, stream=1)]
    for other in (*others, drawn(seed, step, offset=8 * BLOCK)):
        assert (other[:4] == drawn(seed, step)[:4]).float().mean() < 0.02


def test_words_are_uniform_and_independent() -> None:
    """Means, bits and correlations in rows, columns, steps and streams, each within 5 standard errors."""
    steps = 64
    drawings = [(step, stream) for step in range(1, steps + 1) for stream in range(STREAMS)]
    all_words = torch.stack([drawn(step=step, numel=1 << 14, stream=stream) for step, stream in drawings])
    unit = (all_words.double() / 2**31).view(steps, STREAMS, -1, BLOCK)  # uniform on -1..1, variance 1/3
    count = unit.numel()
    assert abs(float(unit.mean())) < 5 * (1 / 3 / count) ** 0.5
    assert abs(float(unit.square().mean()) * 3 - 1) < 5 * (0.8 / count) ** 0.5
    for bit in range(19, 32):  # the bits that rounding uses
        share = float(((all_words >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / count**0.5, bit
    columns = unit.mean((0, 1, 2)) * (3 * count / BLOCK) ** 0.5
    assert columns.abs().max() < 5
    for axis in range(4):
        a, b = unit.narrow(axis, 1, unit.size(axis) - 1), unit.narrow(axis, 0, unit.size(axis) - 1)
        assert abs(float((a * b).mean()) * 3) < 5 / a.numel() ** 0.5, axis
    flat = unit.reshape(-1, BLOCK)
    correlation = (flat.t() @ flat / len(flat) * 3).fill_diagonal_(0)
    assert correlation.abs().max() < 6.5 / len(flat) ** 0.5  # of 32,640 pairs


def test_stochastic_weights_are_right_on_average() -> None:
    value = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(0))
    total, rounds = torch.zeros_like(value, dtype=torch.float64), 600
    out = torch.empty_like(value, dtype=torch.bfloat16)
    for step in range(rounds):
        stochastic_(out, value, noise_of(1, step, [range(64)], CPU), 4)
        assert ((out.double() - value).abs() <= 2**-7 * value.abs()).all()
        total += out.double()
    error = (total / rounds - value) / value.abs()
    # A step is at most 2^-7 of the value, so one rounding's deviation at most half of that.
    sigma = 2**-8 / rounds**0.5
    assert error.abs().max() < 5.5 * sigma
    assert abs(float(error.mean())) < 5 * sigma / value.numel() ** 0.5
    exact = value.to(torch.bfloat16)
    stochastic_(out, exact.float(), noise_of(1, 3, [range(64)], CPU), 4)
    assert torch.equal(out, exact)


@pytest.mark.parametrize("rule", [AdamRule(nesterov=True, cautious=True), AdanRule()])
@pytest.mark.parametrize("state_format", ["f24", "log16", "bf16", "int8"])
def test_slices_and_tiles_change_no_bit_of_packed_states(state_format: str, rule, monkeypatch) -> None:
    numel = 256 * 41 + 77
    spec = UpdateSpec(rule=rule, state_format=formats_for(rule, state_format), weight_precision="stochastic", seed=4)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).to(torch.bfloat16)
    grads = [torch.randn(numel, generator=generator).to(torch.bfloat16) for _ in range(4)]

    def run(cuts: list[int], tile: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("trainer.optim.base._tile_size", lambda *_: tile)
        weight, storage = start.clone(), make_storage(spec, numel, start.dtype)
        for step, grad in enumerate(grads, 1):
            for a, b in zip([0, *cuts], [*cuts, numel], strict=True):
                part = slice_storage(storage, a, b, numel)
                update_chunk_(spec, weight[a:b], grad[a:b], part, lr=1e-3, step=step, offset=a + 512)
        return {"weight": weight, **storage}

    whole = run([], 1 << 20)
    assert (whole["weight"] != start).any()
    for other in (run([256 * 20], 1 << 20), run([256, 2560], 512)):
        assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_two_seeds_round_differently() -> None:
    rule = AdamRule()
    results = []
    for seed in (1, 1, 2):
        spec = UpdateSpec(rule=rule, state_format=formats_for(rule, "log16"), weight_precision="stochastic", seed=seed)
        weight = torch.ones(8192, dtype=torch.bfloat16)
        storage = make_storage(spec, 8192, weight.dtype)
        grad = torch.linspace(-1, 1, 8192)
        update_chunk_(spec, weight, grad, storage, lr=1e-4, step=1)
        results.append(weight)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])

"""The running average of the weights: its codes, and its updates against a float64 reference."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from states import ADAN, KINDS

from benchmarks.meter import extra_memory
from trainer.config import OptimizerConfig
from trainer.optim import tile
from trainer.optim.average import Fixed16, decay_at, difference
from trainer.optim.base import averaged, make_storage, master, slice_storage, spec_from_config, update_chunk_
from trainer.optim.rounding import noise_of

CPU = torch.device("cpu")


def code(value: torch.Tensor, step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A round trip of ``value`` [rows, 256]: the storage, and what it decodes to."""
    kind, rows = Fixed16(), len(value)
    layout = kind.layout("x", value.numel(), True)
    storage = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
    storage["x"] = storage["x"].view(rows, 256)
    kind.encode_(storage, "x", value, True, noise_of(1, step, [range(rows)], CPU), 5, None)
    return storage, kind.decode(storage, "x", True)


@example([1 - 2.0**-24, 2.0**-24 - 1] * 128, 1)  # what rounds up to a power of two is not cut off
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=256), st.integers(1, 10**6))
def test_a_code_is_within_one_unit_of_the_blocks_largest(values: list[float], step: int) -> None:
    value = torch.zeros(1, 256)
    value[0, : len(values)] = torch.tensor(values)
    _, found = code(value, step)
    unit = max(float(value.abs().max()) * 2.0**-14, 2.0**-108)
    assert found.isfinite().all() and float((found - value).abs().max()) <= unit
    assert torch.equal(code(found, step + 1)[1], found)  # what it can hold exactly, it does


def test_zero_bytes_are_zero_and_zeros_stay() -> None:
    kind = Fixed16()
    empty = {"x": torch.zeros(2, 256, dtype=torch.int16), "x.scale": torch.zeros(2, dtype=torch.int32)}
    assert torch.equal(kind.decode(empty, "x", True), torch.zeros(2, 256))
    storage, found = code(torch.zeros(2, 256), 1)
    assert torch.equal(found, torch.zeros(2, 256)) and not storage["x"].any() and not storage["x.scale"].any()


def test_codes_are_right_on_average() -> None:
    value = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, 8)[:, None]
    rounds = 800
    mean = sum(code(value, step)[1].double() for step in range(rounds)) / rounds
    unit = value.abs().amax(1, keepdim=True).double() * 2.0**-14
    assert ((mean - value).abs() < 5.5 * 0.5 * unit / rounds**0.5).all()
    assert abs(float(((mean - value) / unit).mean())) < 5 * 0.5 / (rounds * value.numel()) ** 0.5


def run_average(settings: dict, decay: float, steps: int, numel: int = 256 * 17, dtype=None):
    """Weights, storage and the float64 average after ``steps`` updates on a random problem; and the middle's error."""
    config = OptimizerConfig(**{"lr": 1e-3, **settings})
    spec = spec_from_config(config, 7, decay)
    dtype = dtype or (torch.float32 if config.weight_precision == "f32" else torch.bfloat16)
    g = torch.Generator().manual_seed(3)
    weight = (0.05 * torch.randn(numel, generator=g)).to(dtype)
    goal = 0.05 * torch.randn(numel, generator=g)
    storage = make_storage(spec, numel, dtype)
    reference = master(weight, storage).double().clone()
    for step in range(1, steps + 1):
        grad = master(weight, storage) - goal + 0.1 * torch.randn(numel, generator=g)
        update_chunk_(spec, weight, grad, storage, lr=config.lr, step=step)
        d = decay_at(decay, step)
        reference = d * reference + (1 - d) * master(weight, storage).double()
    return weight, storage, reference


@pytest.mark.parametrize(("settings", "decay"), [*((s, 0.999) for s in KINDS), ({}, 0.9), ({}, 0.9999)], ids=str)
def test_it_follows_a_float64_average_for_hundreds_of_steps(settings, decay) -> None:
    """Root mean square error under 0.5 % of the difference's, mean error under 0.05 % of it: 300 steps."""
    weight, storage, reference = run_average(settings, decay, 300)
    true = reference - master(weight, storage).double()
    error = difference(storage, weight.numel()).double() - true
    size = float(true.square().mean().sqrt())
    assert size > 0 and float(error.square().mean().sqrt()) < 0.005 * size
    assert abs(float(error.mean())) < 0.0005 * size
    if decay < 0.999:  # the float32 sum is the average
        assert torch.allclose(averaged(weight, storage).double(), reference, rtol=0, atol=0.005 * size)


@pytest.mark.slow
def test_a_slow_average_stays_right_for_thousands_of_steps() -> None:
    weight, storage, reference = run_average({"weight_precision": "split"}, 0.9999, 6000, numel=256 * 8)
    true = reference - master(weight, storage).double()
    error = difference(storage, weight.numel()).double() - true
    size = float(true.square().mean().sqrt())
    assert float(error.square().mean().sqrt()) < 0.01 * size and abs(float(error.mean())) < 0.001 * size


@pytest.mark.parametrize("numel", [100, 4096])
def test_small_tensors_keep_it_in_float32(numel: int) -> None:
    weight, storage, reference = run_average({"weight_precision": "split"}, 0.99, 100, numel=numel)
    assert storage["ema"].dtype == torch.float32 and "ema.scale" not in storage
    assert torch.allclose(averaged(weight, storage).double(), reference, rtol=1e-6, atol=1e-8)


def test_float32_weights_keep_it_packed_too() -> None:
    weight, storage, reference = run_average({"weight_precision": "split"}, 0.999, 200, dtype=torch.float32)
    assert storage["ema"].dtype == torch.int16
    size = float((reference - weight.double()).square().mean().sqrt())
    assert float((averaged(weight, storage).double() - reference).square().mean().sqrt()) < 0.005 * size


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [100, 256 * 20])
def test_where_gradients_are_not_finite_only_the_average_comes_nearer(monkeypatch, readable, dtype, numel) -> None:
    """Whether the host may look at the flag or not: the same bits."""
    monkeypatch.setattr("trainer.optim.base._readable", lambda device: readable)
    spec = spec_from_config(OptimizerConfig(), 7, 0.999)
    weight, storage = torch.randn(numel).to(dtype), make_storage(spec, numel, dtype)
    for step in (1, 2, 3):
        update_chunk_(spec, weight, torch.randn(numel), storage, lr=1e-3, step=step)
    before = {name: t.clone() for name, t in storage.items()}
    kept, old = weight.clone(), difference(storage, numel).clone()
    assert float(old.abs().max()) > 0
    bad = torch.randn(numel)
    bad[7] = float("nan")
    update_chunk_(spec, weight, bad, storage, lr=1e-3, step=4)
    assert torch.equal(weight, kept)
    assert all(torch.equal(storage[n], before[n]) for n in storage if not n.startswith("ema"))
    unit = float(old.abs().max()) * 2.0**-14
    assert torch.allclose(difference(storage, numel), old * decay_at(0.999, 4), rtol=1e-6, atol=unit)


def test_the_hosts_look_at_the_flag_changes_no_bit(monkeypatch) -> None:
    results = []
    for readable in (True, False):
        monkeypatch.setattr("trainer.optim.base._readable", lambda device, r=readable: r)
        spec = spec_from_config(OptimizerConfig(), 7, 0.999)
        g = torch.Generator().manual_seed(0)
        weight = torch.randn(256 * 20 + 19, generator=g).bfloat16()
        storage = make_storage(spec, weight.numel(), weight.dtype)
        for step in range(1, 6):
            grad = torch.randn(weight.numel(), generator=g)
            if step == 3:
                grad[0] = float("inf")
            update_chunk_(spec, weight, grad, storage, lr=1e-3, step=step)
        results.append({"weight": weight, **storage})
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@pytest.mark.parametrize("settings", KINDS[:4], ids=lambda s: s["weight_precision"])
def test_slices_and_tiles_change_no_bit_and_the_weights_know_nothing_of_it(settings, monkeypatch) -> None:
    config = OptimizerConfig(**{"lr": 1e-3, **settings})
    spec = spec_from_config(config, 7, 0.999)
    dtype = torch.float32 if config.weight_precision == "f32" else torch.bfloat16
    numel = 256 * 41 + 77
    g = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=g).to(dtype)
    grads = [torch.randn(numel, generator=g) for _ in range(4)]

    def run(spec, cuts: list[int], tile: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr("trainer.optim.base._tile_size", lambda *_: tile)
        weight, storage = start.clone(), make_storage(spec, numel, dtype)
        for step, grad in enumerate(grads, 1):
            for a, b in zip([0, *cuts], [*cuts, numel], strict=True):
                part = slice_storage(storage, a, b, numel)
                update_chunk_(spec, weight[a:b], grad[a:b], part, lr=config.lr, step=step, offset=a)
        return {"weight": weight, **storage}

    whole = run(spec, [], 1 << 20)
    assert whole["ema"].any()
    for other in (run(spec, [256 * 20], 1 << 20), run(spec, [256, 2560], 512)):
        assert all(torch.equal(whole[name], other[name]) for name in whole)
    formats = {name: kind for name, kind in spec.state_format.items() if name != "ema"}
    without = run(replace(spec, state_format=formats, ema_decay=0.0), [], 1 << 20)
    assert all(torch.equal(whole[name], without[name]) for name in without)


@pytest.mark.parametrize("kind", [{}, ADAN], ids=["nadam", "adan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_update_with_it_takes_less_than_64_mb_more(monkeypatch, kind, dtype) -> None:
    """With the tiles of a GPU, where the host must not look at the flag; and no more for a larger tensor."""
    monkeypatch.setattr("trainer.optim.base._readable", lambda device: False)
    monkeypatch.setattr("trainer.optim.base._tile_size", lambda *_: 1 << (20 if kind else 21))
    spec = spec_from_config(OptimizerConfig(**kind), 7, 0.999)
    peaks = []
    for numel in (1 << 21, 5 << 20):
        weight, grad = torch.zeros(numel, dtype=dtype), torch.ones(numel)
        storage = make_storage(spec, numel, dtype)
        ok = torch.ones((), dtype=torch.bool)
        peaks.append(extra_memory(partial(update_chunk_, spec, weight, grad, storage, lr=1e-3, step=1, ok=ok)))
    assert max(peaks) < 64 * 10**6 and peaks[1] < 1.05 * peaks[0], peaks


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler here")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_code_writes_the_same_average_and_is_compiled_once(monkeypatch, dtype) -> None:
    """Of weights that move alike its codes are the same; over steps that differ in their last bits, all but the same.
    The decay rises from step to step, and one gradient is not finite."""
    monkeypatch.setattr("trainer.optim.base._readable", lambda device: False)
    plain = spec_from_config(OptimizerConfig(), 7, 0.999)
    results = []
    for compile in (False, True):
        g = torch.Generator().manual_seed(0)
        weight = torch.randn(1 << 18, generator=g).to(dtype)
        storage = make_storage(plain, weight.numel(), dtype)
        for step in range(1, 7):
            grad = torch.randn(weight.numel(), generator=g)
            if step == 3:
                grad[0] = float("nan")
            with torch._dynamo.config.patch(error_on_recompile=compile and step > 1):
                update_chunk_(replace(plain, compile=compile), weight, grad, storage, lr=1e-3 / step, step=step)
            if step == 1:
                first = {name: t.clone() for name, t in storage.items() if name.startswith("ema")}
        results.append((first, difference(storage, weight.numel()).clone()))
    (first, eager), (other, compiled) = results
    same = [(first[n] == other[n]).float().mean() for n in first]
    assert min(same) > 0.999, same
    assert (eager - compiled).norm() < 1e-3 * eager.norm()


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler here")
@pytest.mark.slow
def test_compiled_code_follows_the_same_weights_bit_for_bit() -> None:
    """The rule's sums may differ in their last bits; what follows from the weights does not."""
    spec = spec_from_config(OptimizerConfig(), 7, 0.999)
    moved = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 1e-4
    noise, decay = noise_of(1, 3, [range(64)], CPU), torch.tensor(0.9375)
    results = []
    for follow in (tile._follow, torch.compile(tile._follow, fullgraph=True)):
        storage = {"ema": torch.zeros(64, 256, dtype=torch.int16), "ema.scale": torch.zeros(64, dtype=torch.int32)}
        for _ in range(3):
            follow(spec, storage, moved, tile.Given(None, noise, decay=decay))
        results.append(storage)
    assert results[0]["ema"].any() and all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_a_short_training_does_not_average_its_beginning() -> None:
    assert decay_at(0.9999, 1) == pytest.approx(2 / 11) and decay_at(0.5, 1000) == 0.5
    assert decay_at(0.9999, 10**6) == 0.9999

"""What an update costs: memory that does not grow with the tensor, few passes, and compiled code that agrees."""

from __future__ import annotations

import shutil

import pytest
import torch

from benchmarks.meter import extra_memory, traffic_per_element
from trainer.optim import (
    STATE_FORMATS,
    AdamRule,
    AdanOffload,
    AdanRule,
    NAdamOffload,
    UpdateSpec,
    formats_for,
    make_storage,
    master,
    update_chunk_,
)
from trainer.optim.average import STORED
from trainer.optim.base import _tile_size
from trainer.optim.rounding import noise_of

compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler here")
MB = 10**6


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("state_format", STATE_FORMATS)
@pytest.mark.parametrize("make", [NAdamOffload, AdanOffload])
def test_a_step_takes_less_than_64_mb_however_large_the_tensor(make, state_format, guarded, monkeypatch) -> None:
    """With the tiles of a GPU, whose states cross over chunk by chunk: those chunks are counted in."""
    if guarded:
        monkeypatch.setattr("trainer.optim.base._readable", lambda device: False)
    if state_format != "u16pow":
        size = 1 << (21 if make is NAdamOffload else 20)
        monkeypatch.setattr("trainer.optim.base._tile_size", lambda *_: size)
    peaks = []
    for numel in (1 << 21, 5 << 20):
        p = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = make([p], state_format=state_format, **({"cautious": True} if make is NAdamOffload else {}))
        optimizer.step()
        peaks.append(extra_memory(optimizer.step))
        states = [part.nbytes for part in optimizer.state[p].values() if isinstance(part, torch.Tensor)]
        crossing = (1 << 20) * sum(states) / numel
    assert max(peaks) + crossing < 64 * MB
    assert peaks[1] < 1.01 * peaks[0]


@pytest.mark.parametrize(
    ("rule", "state_format", "kernels", "traffic"),
    [
        (AdamRule(nesterov=True, cautious=True), "f32", 21, 200),
        (AdamRule(nesterov=True, cautious=True), "log16", 50, 425),
        (AdanRule(), "log16", 76, 655),
    ],
)
def test_passes_over_memory_stay_few(rule, state_format: str, kernels: int, traffic: float) -> None:
    """Eagerly, bf16 weights and ``split``: the whole of decoding, update, encoding and the check of the gradient."""
    numel = 1 << 18
    spec = UpdateSpec(rule=rule, state_format=formats_for(rule, state_format))
    weight, storage = torch.zeros(numel, dtype=torch.bfloat16), make_storage(spec, numel, torch.bfloat16)
    assert numel <= _tile_size(spec, weight, storage)
    grad = torch.ones_like(weight)
    found = traffic_per_element(
        lambda: update_chunk_(spec, weight, grad, storage, lr=1e-3, step=1), numel
    )
    assert found[0] <= kernels and found[1] <= traffic, found


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STORED if name != "u16pow"])  # its powers are floats
def test_compiled_codecs_write_the_same_codes(name: str) -> None:
    kind = STORED[name]
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 2, 64)[:, None]
    value[3] = 0
    noise = noise_of(1, 3, [range(64)], torch.device("cpu"))

    def round_trip(value, storage, noise, signed: bool):
        kind.encode_(storage, "x", value, signed, noise, 0, None)
        return kind.decode(storage, "x", signed)

    for signed in (True, False):
        results = []
        for function in (round_trip, torch.compile(round_trip, fullgraph=True)):
            layout = kind.layout("x", value.numel(), signed)
            storage = {k: torch.zeros(shape, dtype=dtype) for k, (dtype, shape) in layout.items()}
            storage = {k: v.view(-1, 256) if v.numel() == value.numel() else v for k, v in storage.items()}
            given = value.clone() if signed else value.square()
            decoded = function(given, storage, noise, signed).clone()
            results.append({**storage, "decoded": decoded})
        assert all(torch.equal(results[0][k], results[1][k]) for k in results[0]), signed


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("make", [NAdamOffload, AdanOffload])
def test_a_compiled_step_agrees_and_is_compiled_once(make) -> None:
    """Weights within float32's rounding; rates, steps, gradients that are not finite: nothing is compiled anew."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((300, 900), (5000,), (40, 200), (1 << 18,))]
    results = []
    for compile in (False, True):
        parameters = [torch.nn.Parameter(x.to(torch.bfloat16)) for x in start]
        optimizer = make(parameters, lr=1e-3, compile=compile, weight_decay=0.01)
        draws = torch.Generator().manual_seed(1)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=draws).to(torch.bfloat16)
            if step == 3:
                parameters[0].grad[0, 0] = float("nan")
            with torch._dynamo.config.patch(error_on_recompile=compile and step > 0):
                optimizer.step()
        assert int(optimizer.skipped) == 1
        masters = [master(p.detach().view(-1), optimizer.state[p]) for p in parameters]
        codes = [optimizer.state[p]["exp_avg_sq"].to(torch.int32) & 0xFFFF for p in parameters]
        results.append((masters, codes))
    (masters, codes), (other_masters, other_codes) = results
    for a, b, x in zip(masters, other_masters, start, strict=True):
        assert (a - b).norm() < 1e-3 * (a - x.to(torch.bfloat16).float().view(-1)).norm()
    for a, b in zip(codes, other_codes, strict=True):
        assert ((a - b).abs() <= 1).all() and (a == b).float().mean() > 0.9

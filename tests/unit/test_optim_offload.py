"""The torch optimizers: every parameter moves, what is not finite is left out, clips and schedules do as they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from states import same
from torch import nn
from zoo import OPTIMIZERS, Zoo, contents, give_gradients

from trainer.optim import (
    SMALL,
    STATE_FORMATS,
    AdamOffload,
    AdanOffload,
    NAdamOffload,
    finite,
    fuse_backward,
    update_chunk_,
)

Make = Callable[..., Any]


@pytest.mark.parametrize("precision", ["split", "stochastic", "nearest"])
@pytest.mark.parametrize("state_format", STATE_FORMATS)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_kind_of_parameter_moves(name: str, state_format: str, precision: str) -> None:
    """At a rate of 1e-5, whose steps are far below a bf16 step of most weights (so not under ``nearest``)."""
    module = Zoo()
    lr = 1e-2 if precision == "nearest" else 1e-5
    optimizer = OPTIMIZERS[name](module.parameters(), lr=lr, state_format=state_format, weight_precision=precision)
    before = contents(module, optimizer)
    for step in range(25):
        give_gradients(module, seed=step % 3)  # a direction that lasts
        optimizer.step()
    assert int(optimizer.skipped) == 0
    after = contents(module, optimizer)
    for key, p in module.named_parameters():
        moved = after[key] != before[key]
        if p.numel() == 0:
            continue
        if p.dtype == torch.float32:
            assert moved.float().mean() > 0.99, key
        elif precision == "split":
            assert (moved | (after[f"{key}.residual"].view_as(moved) != 0)).float().mean() > 0.98, key
        else:
            assert moved.any(), key
        kept = {part.dtype for k, part in after.items() if k.startswith(f"{key}.exp_avg")}
        assert (kept == {torch.float32}) == (p.numel() <= SMALL or state_format == "f32"), key


@pytest.mark.parametrize("on_the_device", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("state_format", STATE_FORMATS)
def test_a_gradient_that_is_not_finite_leaves_its_tensor_alone(
    state_format: str, bad: float, on_the_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU, and as on a GPU, where the host must not wait to know: the others step, the flag is raised."""
    for name, precision in itertools.product(("NAdamOffload", "AdanOffload"), ("split", "stochastic")):
        module, twin = Zoo(), Zoo()
        make = OPTIMIZERS[name]
        settings = {"lr": 1e-3, "weight_decay": 0.1, "state_format": state_format, "weight_precision": precision}
        optimizer, reference = make(module.parameters(), **settings), make(twin.parameters(), **settings)
        spoiled = ("weight", "weight_f32", "bias")
        for step in range(3):
            for m, o in ((module, optimizer), (twin, reference)):
                give_gradients(m, step)
                o.step()
        before = contents(module, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr("trainer.optim.base._readable", lambda device: not on_the_device)
            give_gradients(module, 3)
            for key in spoiled:
                module.get_parameter(key).grad.view(-1)[3] = bad
            optimizer.step()
        give_gradients(twin, 3)
        reference.step()
        after, others = contents(module, optimizer), contents(twin, reference)
        assert int(optimizer.skipped) == len(spoiled)
        for key in after:
            expected = before if key.split(".")[0] in spoiled else others
            assert torch.equal(after[key], expected[key]), (name, precision, key)


def test_fused_backward_equals_step_and_frees_the_gradients() -> None:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(80, 100), nn.Tanh(), nn.Linear(100, 3)).to(torch.bfloat16)
        settings = {"lr": 1e-3, "weight_precision": "stochastic", "clip": "previous", "max_norm": 0.1}
        return module, NAdamOffload(module.parameters(), **settings)

    data = torch.randn(5, 80, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    (plain, optimizer), (fused, hooked) = build(), build()
    start = contents(plain, optimizer)["0.weight"]
    handle = fuse_backward(fused, hooked)
    for _ in range(4):
        plain(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fused(data).square().mean().backward()
        assert all(p.grad is None for p in fused.parameters())
        hooked.step()
    # Backwards or forwards: neither the rounding nor the clipping minds the order.
    a, b = contents(plain, optimizer), contents(fused, hooked)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[k].float(), b[k].float(), rtol=1e-6, atol=0) for k in a)
    assert not torch.equal(a["0.weight"], start)
    handle.remove()
    before = contents(fused, hooked)
    fused(data).square().mean().backward()
    assert all(p.grad is not None for p in fused.parameters())
    assert same(before, contents(fused, hooked))
    with pytest.raises(ValueError, match="none of the module"):
        fuse_backward(nn.Linear(2, 2), hooked)


def test_an_arena_is_updated_as_the_parameters_in_it() -> None:
    """The engine's way, one flat arena, writes the codes of the optimizer's way."""
    sizes = [(70, 90), (4500,), (5000,)]
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    optimizer = NAdamOffload(parameters, lr=1e-3, seed=9)
    starts = list(optimizer._offsets.values())
    total = optimizer._end
    assert all(start % 256 == 0 for start in starts)
    spec = optimizer.spec_of(optimizer.param_groups[0])
    from trainer.optim import make_storage

    weight, storage = torch.zeros(total), make_storage(spec, total, torch.float32)
    for start, p in zip(starts, parameters, strict=True):
        weight[start : start + p.numel()] = p.detach().view(-1)
    for step in range(1, 4):
        grad = torch.zeros(total)
        for start, p in zip(starts, parameters, strict=True):
            p.grad = torch.randn_like(p)
            grad[start : start + p.numel()] = p.grad.view(-1)
        optimizer.step()
        update_chunk_(spec, weight, grad, storage, lr=1e-3, step=step)
    for start, p in zip(starts, parameters, strict=True):
        assert torch.equal(weight[start : start + p.numel()], p.detach().view(-1))
        codes = optimizer.state[p]["exp_avg_sq"]
        assert torch.equal(storage["exp_avg_sq"][start : start + len(codes)], codes)


def test_schedulers_and_groups() -> None:
    module = Zoo()
    named = dict(module.named_parameters())
    groups = [
        {"params": [named["weight"]]},
        {"params": [named["weight_f32"]], "lr": 0.0, "state_format": "int8"},
        {"params": [named["bias"]], "betas": (0.5, 0.5)},
    ]
    optimizer = NAdamOffload(groups, lr=1e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    before = contents(module, optimizer)
    for step in range(4):
        give_gradients(module, step)
        optimizer.step()
        cosine.step()
    assert optimizer.param_groups[0]["lr"] < 1e-9
    after = contents(module, optimizer)
    assert torch.equal(after["weight_f32"], before["weight_f32"]) and not torch.equal(after["weight"], before["weight"])
    assert after["weight_f32.exp_avg"].dtype == torch.int8 and after["weight.exp_avg"].dtype == torch.int16
    cycle = torch.optim.lr_scheduler.OneCycleLR(NAdamOffload(module.parameters(), lr=1e-3), 1e-3, total_steps=5)
    cycle.optimizer.step()
    cycle.step()


@pytest.mark.parametrize("clip", ["tensor", "previous"])
def test_clipping_does_what_it_says(clip: str) -> None:
    """Against gradients clipped beforehand by the same rule, in an optimizer without clipping."""
    shapes = [(30, 40), (50,), (2000, 3)]
    ours = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    theirs = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    settings: dict[str, Any] = {"lr": 1e-2, "state_format": "f32"}
    clipped = AdamOffload(ours, clip=clip, max_norm=0.5, **settings)
    plain = AdamOffload(theirs, **settings)
    previous: float | None = None
    generator = torch.Generator().manual_seed(0)
    factors = []
    for step in range(6):
        size = 10.0 ** (step % 3 - 2)
        norm_sq = 0.0
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator) * size
            own = float(a.grad.double().norm())
            norm_sq += own**2
            norm = own if clip == "tensor" else previous
            factor = 1.0 if norm is None else min(1.0, 0.5 / (norm + 1e-6))
            b.grad = a.grad * factor
            factors.append(factor)
        previous = norm_sq**0.5
        clipped.step()
        plain.step()
    assert min(factors) < 0.1 and max(factors) == 1.0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["AdamOffload", "NAdamWOffload"])
def test_the_papers_rescale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of arXiv 2411.16085 divided by its mean, in float64; the mean is the whole tensor's, not a tile's."""
    monkeypatch.setattr("trainer.optim.base._tile_size", lambda *_: 512)
    monkeypatch.setattr("trainer.optim.offload.CHUNK", 1024)
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(5000, generator=generator))
    decoupled, nesterov = name.endswith("WOffload"), name.startswith("N")
    settings = {"lr": 1e-2, "weight_decay": 0.1, "cautious": True, "cautious_rescale": True, "state_format": "f32"}
    optimizer = OPTIMIZERS[name]([p], **settings)
    x, m, v = p.detach().double().numpy().copy(), 0.0, 0.0
    for t in range(1, 51):
        p.grad = torch.randn(5000, generator=generator)
        p.grad[::7] = 0
        g = p.grad.double().numpy() + (0 if decoupled else 0.1) * x
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        ahead = 0.9 * m / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t) if nesterov else m / (1 - 0.9**t)
        update = ahead / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        mask = update * g > 0
        x = x - 1e-2 * (update * mask / max(mask.mean(), 1e-3) + (0.1 * x if decoupled else 0))
        optimizer.step()
    error = np.linalg.norm(p.detach().double().numpy() - x) / np.linalg.norm(x)
    assert error < 1e-4  # an element at the mask's edge may fall to the other side in float32


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("learning rate", lambda p: AdamOffload(p, lr=-1.0)),
        ("learning rate", lambda p: AdamOffload(p, lr=float("nan"))),
        ("betas", lambda p: AdanOffload(p, betas=(0.9, 0.999))),
        ("state format", lambda p: AdamOffload(p, state_format="fp4")),
        ("state_format", lambda p: AdamOffload(p, state_format={"exp_avg_diff": "f32"})),
        ("weight precision", lambda p: AdamOffload(p, weight_precision="kahan")),
        ("clip", lambda p: AdamOffload(p, clip="global")),
        ("max_norm", lambda p: AdamOffload(p, clip="tensor", max_norm=0.0)),
        ("float16", lambda p: AdamOffload([nn.Parameter(torch.zeros(3, dtype=torch.float16))])),
        ("f32 needs float32", lambda p: AdamOffload(p, weight_precision="f32")),
    ],
)
def test_wrong_settings_are_named(words: str, make: Make) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{words}[^\n]*$"):
        make([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = AdamOffload(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert bool(finite(torch.zeros(2)))

"""The torch optimizers: every parameter moves, what is not finite is left out, a resumed run goes on bit for bit."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer.optim import (
    SMALL,
    STATE_FORMATS,
    AdamOffload,
    AdamWOffload,
    AdanOffload,
    NAdamOffload,
    NAdamWOffload,
    finite,
    fuse_backward,
    update_chunk_,
)

OPTIMIZERS = {c.__name__: c for c in (AdamOffload, AdamWOffload, NAdamOffload, NAdamWOffload, AdanOffload)}
ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Any]


class Zoo(nn.Module):
    """One of each kind of parameter: large and small, weight, bias and scale, bf16 and float32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=generator) * 0.1).to(dtype))

        self.weight = parameter(70, 90)
        self.weight_f32 = parameter(90, 70, dtype=torch.float32)
        self.large_bias = parameter(SMALL + 1, dtype=torch.float32)
        self.small = parameter(64, 64)
        self.bias = parameter(9, dtype=torch.float32)
        self.scale = nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(90, 70, generator=generator).to(torch.bfloat16).t())
        self.empty = parameter(0, 3)


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) * 1e-3).to(p.dtype)


def contents(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every bit of the weights and states."""
    found = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        state = optimizer.state[p]
        found |= {f"{name}.{k}": v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


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


@pytest.mark.parametrize("state_format", [*STATE_FORMATS, {"exp_avg": "int8", "exp_avg_sq": "f24"}])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_saving_and_loading_changes_no_bit(name: str, state_format: Any, tmp_path: Path) -> None:
    """Stepping on, or loading into a fresh optimizer (from a file, from a state_dict) and then stepping: the same."""

    def build(module: nn.Module, **settings: Any) -> Any:
        settings = {"lr": 1e-3, "weight_decay": 0.01, "clip": "previous", "max_norm": 0.05, **settings}
        kept = {"state_format": state_format, "weight_precision": "stochastic"}
        return OPTIMIZERS[name](module.parameters(), **kept, **settings)

    module = Zoo()
    optimizer = build(module, seed=5)
    for step in range(3):
        give_gradients(module, step)
        optimizer.step()
    optimizer.save(tmp_path / "states.safetensors")
    packed, weights = optimizer.state_dict(), {k: v.clone() for k, v in module.state_dict().items()}
    packed = {**packed, "state": {i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
                                  for i, s in packed["state"].items()}}  # fmt: skip

    def go_on(module: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
        for step in range(3, 6):
            give_gradients(module, step)
            optimizer.step()
        return contents(module, optimizer)

    expected = go_on(module, optimizer)
    for load in ("file", "state_dict"):
        module = Zoo()
        module.load_state_dict(weights)
        optimizer = build(module, lr=7.0, seed=99)
        if load == "file":
            optimizer.load(tmp_path / "states.safetensors")
        else:
            optimizer.load_state_dict(packed)
        assert same(go_on(module, optimizer), expected), load


NEW_PROCESS = """
import runpy, sys, torch
sys.path.insert(0, sys.argv[1])
names = runpy.run_path(sys.argv[1] + "/tests/unit/test_optim_offload.py")
OPTIMIZERS, contents, give_gradients = names["OPTIMIZERS"], names["contents"], names["give_gradients"]
module = names["Zoo"]()
module.load_state_dict(torch.load(sys.argv[2] + "/weights.pt"))
optimizer = OPTIMIZERS[sys.argv[3]](module.parameters(), state_format=sys.argv[4])
optimizer.load(sys.argv[2] + "/states.safetensors")
give_gradients(module, 7)
optimizer.step()
torch.save(contents(module, optimizer), sys.argv[2] + "/after.pt")
"""


@pytest.mark.parametrize(("name", "state_format"), [("NAdamOffload", "log16"), ("AdanOffload", "f24")])
def test_a_new_process_goes_on_bit_for_bit(name: str, state_format: str, tmp_path: Path) -> None:
    module = Zoo()
    optimizer = OPTIMIZERS[name](module.parameters(), lr=1e-4, state_format=state_format)
    for step in range(2):
        give_gradients(module, step)
        optimizer.step()
    optimizer.save(tmp_path / "states.safetensors")
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    arguments = [sys.executable, "-c", NEW_PROCESS, str(ROOT), str(tmp_path), name, state_format]
    subprocess.run(arguments, check=True, timeout=120)
    give_gradients(module, 7)
    optimizer.step()
    assert same(torch.load(tmp_path / "after.pt"), contents(module, optimizer))


def test_a_file_of_something_else_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    module = Zoo()
    optimizer = NAdamOffload(module.parameters(), lr=1e-3)
    give_gradients(module, 0)
    optimizer.step()
    path = tmp_path / "states.safetensors"
    optimizer.save(path)
    before = contents(module, optimizer)
    others = {
        "AdamOffload": lambda: AdamOffload(Zoo().parameters()),
        "parameter groups": lambda: NAdamOffload(nn.Linear(2, 2).parameters()),
        "otherwise": lambda: NAdamOffload([*reversed(list(Zoo().parameters()))]),
    }
    for words, make in others.items():
        with pytest.raises(ValueError, match=words):
            make().load(path)
    with pytest.raises(ValueError, match="save"):
        (tmp_path / "x.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        optimizer.load(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="state_dict"):
        optimizer.load_state_dict(torch.optim.Adam(Zoo().parameters()).state_dict())
    assert same(before, contents(module, optimizer))


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


@pytest.mark.parametrize("state_format", STATE_FORMATS)
@pytest.mark.parametrize("name", ["NAdamOffload", "AdanOffload"])
def test_states_that_cross_over_come_home(name: str, state_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for parameters on a GPU: copies of chunks are updated and written back, and not a bit differs."""
    results = []
    settings = {"lr": 1e-3, "state_format": state_format}
    if name == "NAdamOffload":
        settings |= {"cautious": True, "cautious_rescale": True}
    for crossing in (False, True):
        if crossing:
            monkeypatch.setattr("trainer.optim.offload._crosses", lambda *_: True)
            monkeypatch.setattr("trainer.optim.offload._to", lambda _, s: {k: v.clone() for k, v in s.items()})
            if state_format != "u16pow":
                monkeypatch.setattr("trainer.optim.offload.CROSSING", 1024)
        module = Zoo()
        optimizer = OPTIMIZERS[name](module.parameters(), **settings)
        for step in range(3):
            give_gradients(module, step)
            optimizer.step()
        results.append(contents(module, optimizer))
    assert same(*results)


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

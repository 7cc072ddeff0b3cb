"""The update rules against independent implementations: torch, and float64 written out from the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainer.config import OptimizerConfig
from trainer.optim import AdamRule, AdanRule, UpdateSpec, make_storage, spec_from_config, update_chunk_

STEPS = 200
LR = 3e-3


def problem(seed: int = 0, numel: int = 1000) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(numel, generator=generator)
    scale = torch.exp(2 * torch.randn(numel, generator=generator))
    grads = [torch.randn(numel, generator=generator) * scale * 1e-3 for _ in range(STEPS)]
    return weight, grads


def ours(rule, weight: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    spec = UpdateSpec(rule=rule, state_format=dict.fromkeys(rule.states, "f32"))
    weight = weight.clone()
    storage = make_storage(spec, weight.numel(), weight.dtype)
    for step, grad in enumerate(grads, 1):
        update_chunk_(spec, weight, grad, storage, lr=LR, step=step)
    return weight


def relative(a: torch.Tensor, b: torch.Tensor | np.ndarray) -> float:
    b = torch.as_tensor(b).double()
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "NAdamW"])
def test_adam_family_equals_torch(kind: str, decay: float) -> None:
    weight, grads = problem()
    parameter = torch.nn.Parameter(weight.clone())
    arguments = {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay}
    decoupled = kind.endswith("W")
    if kind.startswith("N"):
        reference = torch.optim.NAdam([parameter], **arguments, momentum_decay=4e-3, decoupled_weight_decay=decoupled)
    else:
        reference = getattr(torch.optim, kind)([parameter], **arguments)
    for grad in grads:
        parameter.grad = grad.clone()
        reference.step()
    rule = AdamRule(
        betas=(0.9, 0.99),
        weight_decay=decay,
        nesterov=kind.startswith("N"),
        decoupled=decoupled,
        momentum_decay=4e-3 if kind.startswith("N") else 0.0,
    )
    result = ours(rule, weight, grads)
    assert relative(result, parameter.detach()) < 1e-5
    assert relative(weight, parameter.detach()) > 1e-2


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_constant_momentum_nadam(decay: float, cautious: bool) -> None:
    """optax's ``scale_by_adam(nesterov=True)``, written out in float64; the mask as the prototype has it.

    Beside optax 0.2.8 itself, on the same problem: 4e-7 without decay, 2e-6 with it.
    """
    weight, grads = problem(1)
    x, m, v = weight.double().numpy().copy(), 0.0, 0.0
    b1, b2, eps = 0.9, 0.999, 1e-8
    for t, g32 in enumerate(grads, 1):
        g = g32.double().numpy()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        m_hat = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        update = m_hat / (np.sqrt(v / (1 - b2**t)) + eps)
        if cautious:
            update = update * (update * g >= 0)
        x = x - LR * (update + decay * x)
    result = ours(AdamRule(nesterov=True, weight_decay=decay, cautious=cautious), weight, grads)
    assert relative(result, x) < 1e-5


def test_where_the_gradient_is_zero_the_moment_goes_on() -> None:
    """Only the paper's own mask leaves out what has no gradient (arXiv 2411.16085)."""
    grads = [torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])]
    for rescale in (False, True):
        rule = AdamRule(cautious=True, cautious_rescale=rescale)
        once, twice = (ours(rule, torch.zeros(2), grads[:count]) for count in (1, 2))
        assert bool(twice[0] < once[0]) is not rescale and twice[1] < once[1]


@pytest.mark.parametrize("no_prox", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("restart", [0, 60])
def test_adan_equals_the_paper(no_prox: bool, decay: float, restart: int) -> None:
    """The authors' single-tensor code, written out in float64: the first difference is zero."""
    weight, grads = problem(2)
    x = weight.double().numpy().copy()
    b1, b2, b3, eps = 0.98, 0.92, 0.99, 1e-8
    m = d = n = previous = np.zeros_like(x)
    for step, g32 in enumerate(grads, 1):
        g = g32.double().numpy()
        t = (step - 1) % restart + 1 if restart else step
        if t == 1:
            m = d = n = np.zeros_like(x)
            previous = g
        diff = g - previous
        m, d = b1 * m + (1 - b1) * g, b2 * d + (1 - b2) * diff
        n = b3 * n + (1 - b3) * (g + b2 * diff) ** 2
        eta = LR / (np.sqrt(n) / math.sqrt(1 - b3**t) + eps)
        delta = eta * (m / (1 - b1**t) + b2 * d / (1 - b2**t))
        x = x * (1 - LR * decay) - delta if no_prox else (x - delta) / (1 + LR * decay)
        previous = g
    rule = AdanRule(weight_decay=decay, no_prox=no_prox, restart_interval=restart)
    assert relative(ours(rule, weight, grads), x) < 1e-5


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("no_prox", [False, True])
def test_adan_equals_pytorch_optimizer(no_prox: bool, decay: float) -> None:
    """Its version 4.1 follows the authors' code in all that is compared here, the first difference of zero included."""
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    weight, grads = problem(3)
    parameter = torch.nn.Parameter(weight.clone())
    settings = {"lr": LR, "weight_decay": decay, "weight_decouple": no_prox, "foreach": False}
    reference = pytorch_optimizer.Adan([parameter], **settings)
    for grad in grads:
        parameter.grad = grad.clone()
        reference.step()
    assert relative(ours(AdanRule(weight_decay=decay, no_prox=no_prox), weight, grads), parameter.detach()) < 1e-5


def test_spec_from_config_reads_every_switch() -> None:
    config = OptimizerConfig(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5, nesterov=False, decoupled_decay=False,
                             cautious=False, weight_precision="f32")  # fmt: skip
    spec = spec_from_config(config, 7)
    assert spec.rule == AdamRule(
        betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5, nesterov=False, decoupled=False, cautious=False
    )
    assert (spec.weight_precision, spec.seed) == ("f32", 7)
    adan = OptimizerConfig(kind="adan", betas=(0.9, 0.8, 0.7), no_prox=True)
    assert spec_from_config(adan, 0).rule == AdanRule(betas=(0.9, 0.8, 0.7), no_prox=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamRule(betas=(0.9, 1.0)),
        lambda: AdamRule(betas=(0.9, 0.9, 0.9)),  # type: ignore[arg-type]
        lambda: AdanRule(weight_decay=float("nan")),
        lambda: UpdateSpec(rule=AdamRule(), state_format={"exp_avg": "f32"}),
        lambda: UpdateSpec(rule=AdamRule(), state_format=dict.fromkeys(AdamRule.states, "f32"), weight_precision="x"),
    ],
)
def test_wrong_settings_are_named(make) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+: (give|choose)[^\n]+$"):
        make()

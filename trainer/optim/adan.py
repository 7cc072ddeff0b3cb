"""Adan as arithmetic on float32 tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .rules import Factor, addcdiv_, check_betas, check_numbers


class AdanCoefficients(NamedTuple):
    """What changes from step to step. ``root`` is ``sqrt(1 - beta3^t)``, folded into the other factors."""

    keep: Factor
    """0 at the first step and the first after a restart, where moments and difference start from zero; else 1."""
    decay: Factor
    """``1 - lr * weight_decay`` (no_prox) or ``1 + lr * weight_decay``."""
    eps: Factor
    """``eps * root``."""
    step: Factor
    """``-lr * root / (1 - beta1^t)``, for ``exp_avg``."""
    step_diff: Factor
    """``-lr * root * beta2 / (1 - beta2^t)``, for ``exp_avg_diff``."""


@dataclass(frozen=True, kw_only=True)
class AdanRule:
    """Adan (Xie et al. 2022), as the authors' code: its betas are one minus the paper's.

    ``d = g - g_previous`` (0 at the first step); ``exp_avg`` averages ``g``, ``exp_avg_diff`` averages ``d``,
    ``exp_avg_sq`` averages ``(g + beta2 * d)^2``.
    """

    betas: tuple[float, float, float] = (0.98, 0.92, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_prox: bool = False
    """Decay the weight before the update (as AdamW) instead of dividing by ``1 + lr * weight_decay`` after it."""
    restart_interval: int = 0
    """Every so many steps the moments start again from zero; 0: never."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "exp_avg_diff", "previous_grad")
    rescales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_betas(self.betas, 3)
        check_numbers(eps=self.eps, weight_decay=self.weight_decay, restart_interval=self.restart_interval)

    def coefficients(self, lr: float, step: int) -> AdanCoefficients:
        """The factors of update ``step`` (from 1) at learning rate ``lr``."""
        b1, b2, b3 = self.betas
        if self.restart_interval:
            step = (step - 1) % self.restart_interval + 1
        root = math.sqrt(1 - b3**step)
        decay = 1 - lr * self.weight_decay if self.no_prox else 1 + lr * self.weight_decay
        scale = lr * root
        step_size, step_diff = scale / (b1**step - 1), scale * b2 / (b2**step - 1)
        return AdanCoefficients(float(step > 1), decay, self.eps * root, step_size, step_diff)

    def apply_(
        self, weight: Tensor, grad: Tensor, states: Mapping[str, Tensor], c: AdanCoefficients,
        rescale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One update in place of the float32 ``weight`` and states; ``grad`` is left as it is."""
        b1, b2, b3 = self.betas
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        exp_avg_diff, previous = states["exp_avg_diff"], states["previous_grad"]
        work = grad - previous
        if isinstance(c.keep, Tensor) or c.keep != 1:
            for started in (exp_avg, exp_avg_sq, exp_avg_diff, work):
                started.mul_(c.keep)
        exp_avg.lerp_(grad, 1 - b1)
        exp_avg_diff.lerp_(work, 1 - b2)
        torch.add(grad, work, alpha=b2, out=work)
        exp_avg_sq.mul_(b3).addcmul_(work, work, value=1 - b3)
        torch.sqrt(exp_avg_sq, out=work).add_(c.eps)
        if self.weight_decay and self.no_prox:
            weight.mul_(c.decay)
        addcdiv_(weight, exp_avg, work, c.step)
        addcdiv_(weight, exp_avg_diff, work, c.step_diff)
        if self.weight_decay and not self.no_prox:
            weight.div_(c.decay)
        previous.copy_(grad)

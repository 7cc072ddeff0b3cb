"""Adam, AdamW, NAdam and NAdamW as arithmetic on float32 tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .rules import check_betas, check_numbers


class AdamCoefficients(NamedTuple):
    """What changes from step to step. ``root`` is ``sqrt(1 - beta2^t)``, folded into the other factors."""

    decay: float
    """Factor of the weight under decoupled decay: ``1 - lr * weight_decay``."""
    eps: float
    """``eps * root``."""
    momentum: float
    """Factor of ``exp_avg`` in the numerator."""
    gradient: float
    """Factor of the gradient in the numerator (Nesterov only)."""
    step: float
    """``lr * root``."""


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Adam (Kingma and Ba 2015) and, with ``nesterov``, NAdam (Dozat 2016).

    Without ``momentum_decay`` the look-ahead uses a constant momentum, as optax's ``nesterov=True`` does:
    ``[b1 * m / (1 - b1^(t+1)) + (1 - b1) * g / (1 - b1^t)] / (sqrt(v / (1 - b2^t)) + eps)``.
    With it, PyTorch's schedule ``mu_t = b1 * (1 - 0.5 * 0.96^(t * momentum_decay))``.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    nesterov: bool = False
    decoupled: bool = True
    """Decay the weight before the update (AdamW) instead of adding the decay to the gradient (Adam)."""
    cautious: bool = False
    """Leave out update elements whose sign disagrees with the gradient (arXiv 2411.16085), without rescaling."""
    momentum_decay: float = 0.0
    """PyTorch's NAdam schedule (its default is 0.004); 0: constant momentum."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        check_betas(self.betas, 2)
        check_numbers(eps=self.eps, weight_decay=self.weight_decay, momentum_decay=self.momentum_decay)

    def coefficients(self, lr: float, step: int) -> AdamCoefficients:
        """The factors of update ``step`` (from 1) at learning rate ``lr``."""
        b1, b2 = self.betas
        root = math.sqrt(1 - b2**step)
        gradient = 0.0
        if not self.nesterov:
            momentum = 1 / (1 - b1**step)
        elif self.momentum_decay:
            mu, mu_next, product = _schedule(b1, self.momentum_decay, step)
            momentum = mu_next / (1 - product * mu_next)
            gradient = (1 - mu) / (1 - product)
        else:
            momentum = b1 / (1 - b1 ** (step + 1))
            gradient = (1 - b1) / (1 - b1**step)
        return AdamCoefficients(1 - lr * self.weight_decay, self.eps * root, momentum, gradient, lr * root)

    def apply_(self, weight: Tensor, grad: Tensor, states: dict[str, Tensor], c: AdamCoefficients) -> None:
        """One update in place of the float32 ``weight`` and states; ``grad`` is left as it is."""
        b1, b2 = self.betas
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        if self.weight_decay and self.decoupled:
            weight.mul_(c.decay)
        elif self.weight_decay:
            grad = torch.add(grad, weight, alpha=self.weight_decay)
        exp_avg.lerp_(grad, 1 - b1)
        exp_avg_sq.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        root = exp_avg_sq.sqrt().add_(c.eps)
        if not self.nesterov and not self.cautious:
            weight.addcdiv_(exp_avg, root, value=-c.step * c.momentum)
            return
        update = exp_avg * c.momentum
        if self.nesterov:
            update.add_(grad, alpha=c.gradient)
        if not self.cautious:
            weight.addcdiv_(update, root, value=-c.step)
            return
        update.div_(root)
        # The mask as 0.0 and 1.0 in the memory of the root, which is done with.
        torch.mul(update, grad, out=root).ge_(0)
        weight.add_(update.mul_(root), alpha=-c.step)


_products: dict[tuple[float, float], list[float]] = {}


def _schedule(b1: float, momentum_decay: float, step: int) -> tuple[float, float, float]:
    """PyTorch's ``mu_t``, ``mu_(t+1)`` and the product of ``mu_1 .. mu_t``."""

    def mu(t: int) -> float:
        return b1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    products = _products.setdefault((b1, momentum_decay), [1.0])
    while len(products) <= step:
        products.append(products[-1] * mu(len(products)))
    return mu(step), mu(step + 1), products[step]

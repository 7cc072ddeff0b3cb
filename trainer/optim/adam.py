"""Adam, AdamW, NAdam and NAdamW as arithmetic on float32 tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .rules import Factor, add_, addcdiv_, check_betas, check_numbers


class AdamCoefficients(NamedTuple):
    """What changes from step to step. ``root`` is ``sqrt(1 - beta2^t)``, folded into the other factors."""

    decay: Factor
    """Factor of the weight under decoupled decay: ``1 - lr * weight_decay``."""
    eps: Factor
    """``eps * root``."""
    momentum: Factor
    """Factor of ``exp_avg`` in the numerator."""
    gradient: Factor
    """Factor of the gradient in the numerator (Nesterov only)."""
    step: Factor
    """``-lr * root``."""
    plain: Factor
    """``-lr * root * momentum``, for the plain Adam step."""


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
    """Leave out update elements whose sign disagrees with the gradient (arXiv 2411.16085)."""
    cautious_rescale: bool = False
    """As the paper has it: leave out zeros too, and divide by the share that is left (at least 0.001)."""
    momentum_decay: float = 0.0
    """PyTorch's NAdam schedule (its default is 0.004); 0: constant momentum."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        check_betas(self.betas, 2)
        check_numbers(eps=self.eps, weight_decay=self.weight_decay, momentum_decay=self.momentum_decay)

    @property
    def rescales(self) -> bool:
        """Whether ``apply_`` needs the share of elements that the mask keeps."""
        return self.cautious and self.cautious_rescale

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
        size = lr * root
        return AdamCoefficients(
            1 - lr * self.weight_decay, self.eps * root, momentum, gradient, -size, -size * momentum
        )

    def apply_(
        self, weight: Tensor, grad: Tensor, states: Mapping[str, Tensor], c: AdamCoefficients,
        rescale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One update in place of the float32 ``weight`` and states; ``grad`` is left as it is.

        ``rescale`` (0-d) multiplies the masked update where the rule ``rescales``.
        """
        b1, b2 = self.betas
        exp_avg, exp_avg_sq = states["exp_avg"], states["exp_avg_sq"]
        if self.weight_decay and self.decoupled:
            weight.mul_(c.decay)
        grad = self._decayed(weight, grad)
        exp_avg.lerp_(grad, 1 - b1)
        exp_avg_sq.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        root = exp_avg_sq.sqrt().add_(c.eps)
        if not self.nesterov and not self.cautious:
            addcdiv_(weight, exp_avg, root, c.plain)
            return
        update = self._numerator(exp_avg, grad, c)
        if not self.cautious:
            addcdiv_(weight, update, root, c.step)
            return
        update.div_(root)
        # The mask as 0.0 and 1.0, in the memory of the root, which is done with.
        torch.mul(update, grad, out=root)
        update.mul_(root.gt_(0) if self.rescales else root.ge_(0))
        if rescale is not None:
            update.mul_(rescale)
        add_(weight, update, c.step)

    def kept(self, weight: Tensor, grad: Tensor, states: Mapping[str, Tensor], c: AdamCoefficients) -> Tensor:
        """How many elements the paper's mask would keep in ``apply_`` (0-d); nothing is changed."""
        grad = self._decayed(weight, grad)
        update = self._numerator(torch.lerp(states["exp_avg"], grad, 1 - self.betas[0]), grad, c)
        return (update.sign_() * grad > 0).sum()

    def _decayed(self, weight: Tensor, grad: Tensor) -> Tensor:
        if self.weight_decay and not self.decoupled:
            return torch.add(grad, weight, alpha=self.weight_decay)
        return grad

    def _numerator(self, exp_avg: Tensor, grad: Tensor, c: AdamCoefficients) -> Tensor:
        update = exp_avg * c.momentum
        return add_(update, grad, c.gradient) if self.nesterov else update


_products: dict[tuple[float, float], list[float]] = {}


def _schedule(b1: float, momentum_decay: float, step: int) -> tuple[float, float, float]:
    """PyTorch's ``mu_t``, ``mu_(t+1)`` and the product of ``mu_1 .. mu_t``."""

    def mu(t: int) -> float:
        return b1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))

    products = _products.setdefault((b1, momentum_decay), [1.0])
    while len(products) <= step:
        products.append(products[-1] * mu(len(products)))
    return mu(step), mu(step + 1), products[step]

"""Adam, AdamW, NAdam, NAdamW and Adan as torch optimizers with packed states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .adam import AdamRule
from .adan import AdanRule
from .offload import OffloadOptimizer


class _AdamFamily(OffloadOptimizer):
    nesterov = False
    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float = 3.5e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        cautious: bool = False,
        cautious_rescale: bool = False,
        **storage: Any,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "cautious": cautious, "cautious_rescale": cautious_rescale,
        }  # fmt: skip
        super().__init__(params, {**defaults, **self._extra(storage)}, **storage)

    def _extra(self, storage: dict[str, Any]) -> dict[str, Any]:
        """Settings of a subclass, taken out of the keyword arguments."""
        return {}

    @classmethod
    def rule_of(cls, group: Mapping[str, Any]) -> AdamRule:  # type: ignore[override]
        return AdamRule(
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            nesterov=cls.nesterov,
            decoupled=cls.decoupled,
            cautious=group["cautious"],
            cautious_rescale=group["cautious_rescale"],
            momentum_decay=group.get("momentum_decay", 0.0),
        )


class AdamOffload(_AdamFamily):
    """Adam (Kingma and Ba 2015): ``weight_decay`` is added to the gradient.

    Args:
        params: parameters (float32 or bf16) or groups of them, as for any torch optimizer.
        cautious: leave out update elements whose sign disagrees with the gradient (arXiv 2411.16085).
        cautious_rescale: and divide by the share of elements that is left, as the paper does.
        state_format: ``log16``, ``f32``, ``f24``, ``u16pow``, ``bf16`` or ``int8``, or a mapping from state
            (``exp_avg``, ``exp_avg_sq``, for Adan also ``exp_avg_diff`` and ``previous_grad``) to one. Tensors of
            at most 4096 elements keep float32.
        weight_precision: for bf16 parameters. ``split``: 2 more bytes make an exact float32 master; ``stochastic``:
            rounded at random, right on average; ``nearest``: plain rounding, under which small steps are lost.
        seed: of the rounding, which is a hash and not drawn: training again gives the same bits.
        clip: ``tensor`` scales each tensor's gradient down to a norm of at most ``max_norm`` (not the usual global
            clipping: directions change between tensors). ``previous`` scales by the global norm of the step before
            (the first step is not clipped, and a sudden spike only from the next step on).
        compile: run the update through ``torch.compile``: on a GPU one pass over memory.
        offload: keep the states of parameters on a GPU in host memory; False: beside them.

    Raises ``ValueError`` naming a setting that cannot be.
    """


class AdamWOffload(_AdamFamily):
    """Adam with decoupled decay (Loshchilov and Hutter 2019): the weight shrinks by ``lr * weight_decay`` first.

    The arguments are those of ``AdamOffload``.
    """

    decoupled = True


class NAdamOffload(_AdamFamily):
    """Adam with Nesterov's look-ahead (Dozat 2016). The arguments are those of ``AdamOffload``, and:

    Args:
        momentum_decay: 0 keeps the momentum constant, as optax's ``nesterov=True``. 0.004 gives PyTorch's
            schedule, under which the first thousands of steps run at half the momentum.
    """

    nesterov = True

    def _extra(self, storage: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_decay": storage.pop("momentum_decay", 0.0)}


class NAdamWOffload(NAdamOffload):
    """``NAdamOffload`` with decoupled decay, as ``AdamWOffload``."""

    decoupled = True


class AdanOffload(OffloadOptimizer):
    """Adan (Xie et al. 2022, arXiv 2208.06677), as the authors' code: betas are one minus the paper's.

    Its learning rate is 5 to 10 times Adam's. The arguments of storage are those of ``AdamOffload``, and:

    Args:
        no_prox: decay the weight before the update, as AdamW, instead of by the proximal step after it.
        restart_interval: every so many steps the moments start again from zero; 0: never.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3.3e-5,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        no_prox: bool = False,
        restart_interval: int = 0,
        **storage: Any,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "no_prox": no_prox, "restart_interval": restart_interval,
        }  # fmt: skip
        super().__init__(params, defaults, **storage)

    @staticmethod
    def rule_of(group: Mapping[str, Any]) -> AdanRule:
        return AdanRule(
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            no_prox=group["no_prox"],
            restart_interval=group["restart_interval"],
        )

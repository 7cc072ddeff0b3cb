"""The optimizers' arithmetic on flat memory: what to compute, how to keep it, one update of a slice.

A caller owns flat weights, gradients and storage (one arena per block, or per parameter) and calls
``update_chunk_`` on slices of them. Nothing here allocates beyond a few tiles, so a step's extra memory does
not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import OptimizerConfig
from .adam import AdamRule
from .adan import AdanRule
from .rounding import join, split_

BLOCK = 256
"""Parameters start on multiples of this many elements in an arena; packed formats share a scale within it."""
CHUNK = 1 << 22
"""The most elements that the engine hands to one ``update_chunk_``."""
STATE_FORMATS = ("f32",)
WEIGHT_PRECISIONS = ("split", "f32")
GRAD_LIMIT = 2.0**60
"""A gradient element of this size counts as infinite: its square would leave float32."""


@dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """A rule and how its states and the weights are kept."""

    rule: AdamRule | AdanRule
    state_format: Mapping[str, str]
    """Format of each of ``rule.states``."""
    weight_precision: str = "split"
    """What a bf16 weight keeps beyond its 16 bits; a float32 weight steps in float32 under every setting."""
    seed: int = 0
    """Seed of the counted rounding."""

    def __post_init__(self) -> None:
        for name in self.rule.states:
            if self.state_format.get(name) not in STATE_FORMATS:
                found = self.state_format.get(name)
                raise ValueError(f"state format of {name} is {found!r}: choose one of {', '.join(STATE_FORMATS)}")
        if self.weight_precision not in WEIGHT_PRECISIONS:
            choices = ", ".join(WEIGHT_PRECISIONS)
            raise ValueError(f"weight precision is {self.weight_precision!r}: choose one of {choices}")


def spec_from_config(config: OptimizerConfig, seed: int) -> UpdateSpec:
    """The update that an ``OptimizerConfig`` asks for."""
    betas = config.betas
    if config.kind == "adan":
        b1, b2, b3 = betas
        rule = AdanRule(betas=(b1, b2, b3), eps=config.eps, weight_decay=config.weight_decay, no_prox=config.no_prox)
    else:
        b1, b2 = betas
        rule = AdamRule(
            betas=(b1, b2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            nesterov=config.nesterov,
            decoupled=config.decoupled_decay,
            cautious=config.cautious,
        )
    formats = dict.fromkeys(rule.states, config.state_format)
    return UpdateSpec(rule=rule, state_format=formats, weight_precision=config.weight_precision, seed=seed)


def storage_layout(
    spec: UpdateSpec, numel: int, weight_dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor that ``make_storage`` makes, for callers with memory of their own."""
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name: (torch.float32, (numel,)) for name in spec.rule.states
    }
    if weight_dtype == torch.bfloat16:
        if spec.weight_precision != "split":
            raise ValueError(f"weight precision {spec.weight_precision} needs float32 weights: these are bf16")
        layout["residual"] = (torch.int16, (numel,))
    elif weight_dtype != torch.float32:
        raise ValueError(f"a weight is {weight_dtype}: give bf16 or float32 weights")
    return layout


def make_storage(
    spec: UpdateSpec, numel: int, weight_dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Zeroed storage for ``numel`` weights: the states by name, and ``residual`` for bf16 weights under ``split``.

    All zero is where training starts: moments of zero, and masters equal to the bf16 weights.
    """
    layout = storage_layout(spec, numel, weight_dtype)
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in layout.items()}


def slice_storage(storage: Mapping[str, Tensor], start: int, stop: int, numel: int) -> dict[str, Tensor]:
    """Views of the storage of elements ``start`` to ``stop`` out of ``numel``; both multiples of 256, or the end."""
    assert start % BLOCK == 0 and (stop % BLOCK == 0 or stop == numel), (start, stop, numel)
    return {name: part[start:stop] for name, part in storage.items()}


def finite(grad: Tensor) -> Tensor:
    """A 0-d bool tensor on ``grad``'s device: no NaN, no infinity, and nothing whose square would leave float32."""
    if grad.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=grad.device)
    low, high = torch.aminmax(grad)
    return (low > -GRAD_LIMIT) & (high < GRAD_LIMIT)


@torch.no_grad()
def update_chunk_(
    spec: UpdateSpec,
    weight: Tensor,
    grad: Tensor,
    storage: Mapping[str, Tensor],
    *,
    lr: float,
    step: int,
    offset: int,
    key: int,
) -> None:
    """One update, in place, of a flat slice of weights and of its storage.

    Args:
        weight: flat, float32 or bf16. Its storage is ``storage``; all on one device.
        grad: flat, any float dtype; left as it is.
        step: counts from 1.
        offset: place of the slice's first element within its arena (a multiple of 256).
        key: which arena. With ``offset`` it names each element for the counted rounding.
    """
    coefficients = spec.rule.coefficients(lr, step)
    numel, tile = weight.numel(), _tile_size(weight)
    if numel <= tile:
        _update_tile(spec, weight, grad, storage, coefficients)
        return
    for start in range(0, numel, tile):
        stop = min(start + tile, numel)
        part = slice_storage(storage, start, stop, numel)
        _update_tile(spec, weight[start:stop], grad[start:stop], part, coefficients)


def _tile_size(weight: Tensor) -> int:
    # A tile's temporaries should stay in the cache: on a CPU that is worth a factor of five.
    return 1 << 18 if weight.device.type == "cpu" else 1 << 21


def _update_tile(
    spec: UpdateSpec, weight: Tensor, grad: Tensor, storage: Mapping[str, Tensor], coefficients: tuple
) -> None:
    grad = grad if grad.dtype == torch.float32 else grad.to(torch.float32)
    if weight.dtype == torch.float32:
        spec.rule.apply_(weight, grad, storage, coefficients)  # type: ignore[arg-type]
        return
    value = join(weight, storage["residual"])
    spec.rule.apply_(value, grad, storage, coefficients)  # type: ignore[arg-type]
    split_(weight, storage["residual"], value)


def master(weight: Tensor, storage: Mapping[str, Tensor]) -> Tensor:
    """The exact float32 value of a flat weight: a new tensor, or the weight itself where it is float32."""
    if weight.dtype == torch.float32:
        return weight
    return join(weight, storage["residual"])


@torch.no_grad()
def load_master_(weight: Tensor, storage: Mapping[str, Tensor], value: Tensor) -> None:
    """Set a flat weight (and its residual) to the float32 ``value``."""
    assert value.dtype == torch.float32
    if weight.dtype == torch.float32:
        weight.copy_(value)
    else:
        split_(weight, storage["residual"], value)

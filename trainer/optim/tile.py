"""One update of one tile: unpack, step in float32, pack. The same code runs eagerly and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .adam import AdamRule
from .formats import PER_BLOCK, PER_UNIT
from .rounding import BLOCK, WEIGHT_STREAM, Noise, join, nearest_, split_, stochastic_

if TYPE_CHECKING:
    from .base import UpdateSpec


def update_tile(
    spec: UpdateSpec,
    weight: Tensor,
    grad: Tensor,
    storage: Mapping[str, Tensor],
    coefficients: Any,
    noise: Noise | None,
    ok: Tensor | None,
    scale: Tensor | None,
    rescale: Tensor | None,
) -> None:
    """Update ``weight`` and ``storage`` in place: in rows of 256, or flat if all states are float32.

    ``noise`` is needed by what rounds at random. ``ok``, ``scale`` and ``rescale`` are those of ``update_chunk_``.
    """
    rule = spec.rule
    if grad.dtype != torch.float32:
        grad = grad.to(torch.float32)
    if scale is not None:
        grad = grad * scale
    states = {}
    for name in rule.states:
        states[name] = spec.format_of(storage, name).decode(storage, name, name != "exp_avg_sq")
        if ok is not None and states[name] is storage[name]:
            states[name] = storage[name].clone()
    value = master(weight, storage)
    if ok is not None and value is weight:
        value = weight.clone()
    rule.apply_(value, grad, states, coefficients, rescale)
    del grad
    _put_weight(spec, weight, value, storage, noise, ok)
    del value
    for stream, name in enumerate(rule.states):
        kind = spec.format_of(storage, name)
        kind.encode_(storage, name, states.pop(name), name != "exp_avg_sq", noise, stream, ok)


def kept_in_tile(
    spec: UpdateSpec, weight: Tensor, grad: Tensor, storage: Mapping[str, Tensor], coefficients: Any,
    scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """How many elements of a tile in rows the paper's mask would keep (0-d); nothing is changed."""
    assert isinstance(spec.rule, AdamRule)
    grad = grad.to(torch.float32)
    grad = grad if scale is None else grad * scale
    exp_avg = spec.format_of(storage, "exp_avg").decode(storage, "exp_avg", True)
    return spec.rule.kept(master(weight, storage), grad, {"exp_avg": exp_avg}, coefficients)


def in_rows(
    function: Callable[..., Any], spec: UpdateSpec, weight: Tensor, grad: Tensor, storage: Mapping[str, Tensor],
    *rest: Any,
) -> Any:  # fmt: skip
    """Call ``function`` of a flat tile with everything in rows of 256, a ragged end on padded copies."""
    numel = weight.numel()
    missing = -numel % BLOCK

    def rows(part: Tensor) -> Tensor:
        return (F.pad(part, (0, missing)) if missing and part.numel() == numel else part).view(-1, BLOCK)

    flat = {"weight": weight, **{n: p for n, p in storage.items() if not n.endswith((PER_BLOCK, PER_UNIT))}}
    shaped = {name: rows(part) for name, part in flat.items()}
    views = {**storage, **shaped}
    result = function(spec, views.pop("weight"), rows(grad), views, *rest)
    if missing:
        for name, part in flat.items():
            if part.numel() == numel:
                part.copy_(shaped[name].view(-1)[:numel])
    return result


def master(weight: Tensor, storage: Mapping[str, Tensor]) -> Tensor:
    """The exact float32 value of a weight: a new tensor, or the weight itself where it is float32."""
    if weight.dtype == torch.float32:
        return weight
    return join(weight, storage["residual"]) if "residual" in storage else weight.to(torch.float32)


def _put_weight(
    spec: UpdateSpec, weight: Tensor, value: Tensor, storage: Mapping[str, Tensor], noise: Noise | None,
    ok: Tensor | None,
) -> None:  # fmt: skip
    if weight.dtype == torch.float32:
        if value is not weight:
            weight.copy_(torch.where(ok, value, weight))  # type: ignore[arg-type]
    elif "residual" in storage:
        split_(weight, storage["residual"], value, ok)
    elif spec.weight_precision == "stochastic":
        assert noise is not None
        stochastic_(weight, value, noise, WEIGHT_STREAM, ok)
    else:
        nearest_(weight, value, ok)

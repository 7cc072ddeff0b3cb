"""One update of one tile: unpack, step in float32, pack. The same code runs eagerly and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .rounding import WEIGHT_STREAM, Noise, join, nearest_, split_, stochastic_

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
    if weight.dtype != torch.float32:
        value = join(weight, storage["residual"]) if "residual" in storage else weight.to(torch.float32)
    else:
        value = weight if ok is None else weight.clone()
    rule.apply_(value, grad, states, coefficients, rescale)
    del grad
    _put_weight(spec, weight, value, storage, noise, ok)
    del value
    for stream, name in enumerate(rule.states):
        kind = spec.format_of(storage, name)
        kind.encode_(storage, name, states.pop(name), name != "exp_avg_sq", noise, stream, ok)


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

"""The tile update through ``torch.compile``: one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import tile
from .rounding import Noise

if TYPE_CHECKING:
    from .base import UpdateSpec

_functions: dict[Any, Callable[..., None]] = {}


def update_tile(
    full_rows: int,
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
    """``tile.update_tile``, compiled twice for each rule, format and precision: for full tiles, and for any others.

    ``full_rows`` is the number of rows of a full tile: nearly all are full, and a fixed size makes faster code.
    What changes from step to step goes in as 0-d tensors: as numbers, each learning rate would be compiled
    anew until the compiler gave up.
    """
    factors = torch.tensor(coefficients, dtype=torch.float32).to(weight.device, non_blocking=True)
    key = (
        spec.rule, tuple(spec.state_format.items()), spec.weight_precision, weight.dtype, grad.dtype,
        tuple((name, part.dtype) for name, part in storage.items()), weight.device.type,
        ok is None, scale is None, rescale is None, full_rows if weight.size(0) == full_rows else None,
    )  # fmt: skip
    function = _functions.get(key)
    if function is None:
        function = torch.compile(functools.partial(tile.update_tile, spec), fullgraph=True)
        _functions[key] = function
        for part in (weight, grad, *storage.values(), *(() if noise is None else noise[:1])):
            if part.size(0) > 1:
                pass
    function(weight, grad, dict(storage), type(coefficients)(*factors.unbind()), noise, ok, scale, rescale)

"""The tile update through ``torch.compile``: one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import tile

if TYPE_CHECKING:
    from .base import UpdateSpec

_functions: dict[Any, Callable[..., None]] = {}


def update_tile(
    full_rows: int,
    spec: UpdateSpec,
    weight: Tensor,
    grad: Tensor,
    storage: Mapping[str, Tensor],
    given: tile.Given,
) -> None:
    """``tile.update_tile``, compiled twice for each rule, format and precision: for full tiles, and for any others.

    ``full_rows`` is the number of rows of a full tile: nearly all are full, and a fixed size makes faster code.
    What changes from step to step goes in as 0-d tensors: as numbers, each learning rate would be compiled
    anew until the compiler gave up.
    """
    numbers = torch.tensor((*given.coefficients, given.decay), dtype=torch.float32)
    *coefficients, decay = numbers.to(weight.device, non_blocking=True).unbind()
    key = (
        spec.rule, tuple(spec.state_format.items()), spec.weight_precision, bool(spec.ema_decay),
        weight.dtype, grad.dtype, tuple((name, part.dtype) for name, part in storage.items()), weight.device.type,
        tuple(part is None for part in given), full_rows if weight.size(0) == full_rows else None,
    )  # fmt: skip
    function = _functions.get(key)
    if function is None:
        function = torch.compile(functools.partial(tile.update_tile, spec), fullgraph=True)
        _functions[key] = function
    given = given._replace(coefficients=type(given.coefficients)(*coefficients), decay=decay)
    function(weight, grad, dict(storage), given)

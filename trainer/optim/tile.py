"""One update of one tile: unpack, step in float32, pack. The same code runs eagerly and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .adam import AdamRule
from .average import AVERAGE, difference
from .formats import PER_BLOCK, PER_UNIT
from .rounding import AVERAGE_STREAM, BLOCK, WEIGHT_STREAM, Noise, join, nearest_, put_, split_, stochastic_
from .rules import Factor

if TYPE_CHECKING:
    from .base import UpdateSpec


class Given(NamedTuple):
    """What an update is told beside weights, gradient and storage."""

    coefficients: Any
    """The rule's, for this step."""
    noise: Noise | None = None
    """Needed by what rounds at random."""
    ok: Tensor | None = None
    scale: Tensor | None = None
    rescale: Tensor | None = None
    """These three: see ``update_chunk_``."""
    decay: Factor = 0.0
    """Of the running average, if there is one."""


def update_tile(
    spec: UpdateSpec, weight: Tensor, grad: Tensor, storage: Mapping[str, Tensor], given: Given
) -> None:  # fmt: skip
    """Update ``weight`` and ``storage`` in place: in rows of 256, or flat if all of it is float32."""
    rule, ok = spec.rule, given.ok
    if grad.dtype != torch.float32:
        grad = grad.to(torch.float32)
    if given.scale is not None:
        grad = grad * given.scale
    old = None
    if spec.ema_decay:
        old = weight.clone() if weight.dtype == torch.float32 else master(weight, storage)
    states = {}
    for name in rule.states:
        states[name] = spec.format_of(storage, name).decode(storage, name, name != "exp_avg_sq")
        if ok is not None and states[name] is storage[name]:
            states[name] = storage[name].clone()
    value = master(weight, storage)
    if ok is not None and value is weight:
        value = weight.clone()
    rule.apply_(value, grad, states, given.coefficients, given.rescale)
    del grad
    _put_weight(spec, weight, value, storage, given)
    del value
    for stream, name in enumerate(rule.states):
        kind = spec.format_of(storage, name)
        kind.encode_(storage, name, states.pop(name), name != "exp_avg_sq", given.noise, stream, ok)
    if old is not None:
        # Where nothing was written, nothing has moved: the average still comes nearer to the weights.
        _follow(spec, storage, old.sub_(master(weight, storage)), given)


def keep_tile(
    spec: UpdateSpec, weight: Tensor, grad: Tensor, storage: Mapping[str, Tensor], given: Given
) -> None:  # fmt: skip
    """``update_tile`` of a tile that is to stay as it is: only its average comes nearer to it."""
    _follow(spec, storage, None, given)


def _follow(spec: UpdateSpec, storage: Mapping[str, Tensor], moved: Tensor | None, given: Given) -> None:
    """Have the average follow weights that became less by ``moved`` (None: that stayed)."""
    kind = spec.format_of(storage, AVERAGE)
    value = kind.decode(storage, AVERAGE, True)
    if moved is not None:
        value.add_(moved)
    kind.encode_(storage, AVERAGE, value.mul_(given.decay), True, given.noise, AVERAGE_STREAM, None)


def kept_in_tile(
    spec: UpdateSpec, weight: Tensor, grad: Tensor, storage: Mapping[str, Tensor], given: Given
) -> Tensor:
    """How many elements of a tile in rows the paper's mask would keep (0-d); nothing is changed."""
    assert isinstance(spec.rule, AdamRule)
    grad = grad.to(torch.float32)
    grad = grad if given.scale is None else grad * given.scale
    exp_avg = spec.format_of(storage, "exp_avg").decode(storage, "exp_avg", True)
    return spec.rule.kept(master(weight, storage), grad, {"exp_avg": exp_avg}, given.coefficients)


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


def averaged(weight: Tensor, storage: Mapping[str, Tensor]) -> Tensor:
    """The running average of flat weights whose storage has one: a new float32 tensor."""
    return master(weight, storage) + difference(storage, weight.numel())


def _put_weight(
    spec: UpdateSpec, weight: Tensor, value: Tensor, storage: Mapping[str, Tensor], given: Given
) -> None:  # fmt: skip
    noise, ok = given.noise, given.ok
    if weight.dtype == torch.float32:
        if value is not weight:
            put_(weight, value, ok)
    elif "residual" in storage:
        split_(weight, storage["residual"], value, ok)
    elif spec.weight_precision == "stochastic":
        assert noise is not None
        stochastic_(weight, value, noise, WEIGHT_STREAM, ok)
    else:
        nearest_(weight, value, ok)

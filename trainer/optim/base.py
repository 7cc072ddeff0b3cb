"""The optimizers' arithmetic on flat memory: what to compute, how to keep it, one update of a slice.

A caller owns flat weights, gradients and storage (one arena per block, or per parameter) and calls
``update_chunk_`` on slices of them. Nothing here allocates beyond a few tiles, so a step's extra memory does
not grow with the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import OptimizerConfig
from . import compiled
from .adam import AdamRule
from .adan import AdanRule
from .average import AVERAGE, AVERAGE_FORMATS, STORED, decay_at
from .formats import FORMATS, PER_BLOCK, PER_UNIT, POWER_UNIT, Format, rows_of
from .rounding import BLOCK, noise_of, rows_from, split_
from .tile import Given, in_rows, keep_tile, kept_in_tile, update_tile
from .tile import averaged as averaged
from .tile import master as master

CHUNK = 1 << 22
"""The most elements that the engine hands to one ``update_chunk_``."""
SMALL = 4096
"""Tensors of at most this many elements keep float32 states."""
STATE_FORMATS = tuple(FORMATS)
WEIGHT_PRECISIONS = ("split", "stochastic", "nearest", "f32")
GRAD_LIMIT = 2.0**60
"""A gradient element of this size counts as infinite: its square would leave float32."""
Rule = AdamRule | AdanRule


@dataclass(frozen=True, kw_only=True)
class UpdateSpec:
    """A rule and how its states and the weights are kept."""

    rule: Rule
    state_format: Mapping[str, str]
    """Format of each of ``states``; ``formats_for`` fills in the rule's."""
    weight_precision: str = "split"
    """What becomes of a bf16 weight's lower bits: ``split`` keeps them (2 bytes), ``stochastic`` rounds at random,
    ``nearest`` drops them. A float32 weight steps in float32 under every setting; ``f32`` allows no other."""
    seed: int = 0
    """Seed of the counted rounding."""
    compile: bool = False
    """Run the update through ``torch.compile``: one pass over memory, where a compiler is at hand."""
    since: int = 0
    """The step after which the moments were all zero: bias corrections count from there, the counted rounding not."""

    ema_decay: float = 0.0
    """Decay per step of the running average of the weights; 0: there is none."""

    def __post_init__(self) -> None:
        for name in self.states:
            choices = AVERAGE_FORMATS if name == AVERAGE else STATE_FORMATS
            _one_of(f"state format of {name}", self.state_format.get(name), choices)
        unknown = sorted(set(self.state_format) - set(self.states))
        if unknown:
            raise ValueError(f"state_format names {', '.join(unknown)}: name only {', '.join(self.states)}")
        _one_of("weight precision", self.weight_precision, WEIGHT_PRECISIONS)

    @property
    def states(self) -> tuple[str, ...]:
        """What is kept beside the weights: the rule's states, and the average as its difference from them."""
        return (*self.rule.states, AVERAGE) if self.ema_decay else self.rule.states

    def format_of(self, storage: Mapping[str, Tensor], name: str) -> Format:
        """The format that a state of ``storage`` has: its own, or float32 for a small tensor."""
        return STORED["f32" if storage[name].dtype == torch.float32 else self.state_format[name]]


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(choices)}")


def formats_for(rule: Rule | type[AdamRule] | type[AdanRule], state_format: str | Mapping[str, str]) -> dict[str, str]:
    """The format of each state of ``rule``: from one name, or from a mapping whose gaps are ``log16``.

    Adan's previous gradient is no moment: beside packed moments it is kept in bf16, exact where gradients are bf16.
    """
    if not isinstance(state_format, str):
        unknown = sorted(set(state_format) - set(rule.states))
        if unknown:
            raise ValueError(f"state_format names {', '.join(unknown)}: name only {', '.join(rule.states)}")
        return {**formats_for(rule, "log16"), **state_format}
    formats = dict.fromkeys(rule.states, state_format)
    if "previous_grad" in formats and state_format != "f32":
        formats["previous_grad"] = "bf16"
    return formats


def spec_from_config(config: OptimizerConfig, seed: int, ema_decay: float = 0.0) -> UpdateSpec:
    """The update that an ``OptimizerConfig`` asks for; ``ema_decay``: that of the weights' average, if any."""
    betas = config.betas
    if config.kind == "adan":
        b1, b2, b3 = betas
        rule: Rule = AdanRule(
            betas=(b1, b2, b3), eps=config.eps, weight_decay=config.weight_decay, no_prox=config.no_prox
        )
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
    formats = formats_for(rule, config.state_format) | ({AVERAGE: "fixed16"} if ema_decay else {})
    return UpdateSpec(
        rule=rule, state_format=formats, weight_precision=config.weight_precision, seed=seed, ema_decay=ema_decay
    )


def storage_layout(
    spec: UpdateSpec, numel: int, weight_dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor that ``make_storage`` makes, for callers with memory of their own."""
    layout = {}
    for name in spec.states:
        kind = STORED["f32" if numel <= SMALL else spec.state_format[name]]
        layout.update(kind.layout(name, numel, _signed(name)))
    if weight_dtype == torch.bfloat16:
        if spec.weight_precision == "f32":
            raise ValueError("weight precision f32 needs float32 weights: these are bf16")
        if spec.weight_precision == "split":
            layout["residual"] = (torch.int16, (numel,))
    elif weight_dtype != torch.float32:
        raise ValueError(f"a weight is {weight_dtype}: give bf16 or float32 weights")
    return layout


def make_storage(
    spec: UpdateSpec, numel: int, weight_dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Zeroed storage for ``numel`` weights: the states by name, and ``residual`` for bf16 weights under ``split``.

    All zero is where training starts: moments of zero, and masters equal to the bf16 weights. Packed states
    are as long as the next multiple of 256.
    """
    layout = storage_layout(spec, numel, weight_dtype)
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in layout.items()}


def slice_storage(storage: Mapping[str, Tensor], start: int, stop: int, numel: int) -> dict[str, Tensor]:
    """Views of the storage of elements ``start`` to ``stop`` out of ``numel``; both multiples of 256, or the end."""
    assert start % BLOCK == 0 and (stop % BLOCK == 0 or stop == numel), (start, stop, numel)
    views = {}
    for name, part in storage.items():
        unit = BLOCK if name.endswith(PER_BLOCK) else POWER_UNIT if name.endswith(PER_UNIT) else 1
        assert unit != POWER_UNIT or start % unit == 0, f"u16pow is cut at multiples of {unit}, not at {start}"
        views[name] = part[start // unit : -(-stop // unit) if stop < numel else None]
    return views


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
    offset: int = 0,
    rows: Sequence[range] | None = None,
    ok: Tensor | None = None,
    scale: Tensor | None = None,
    rescale: Tensor | None = None,
) -> None:
    """One update, in place, of a flat slice of weights and of its storage.

    Args:
        weight: flat, float32 or bf16. Its storage is ``storage``; all on one device.
        grad: flat, any float dtype; left as it is.
        step: counts from 1.
        offset: place of the slice's first element among all that is trained (a multiple of 256): it names each element
            for the counted rounding.
        rows: the numbers of the slice's rows of 256, in its place, where they do not follow on each other.
        ok: 0-d bool on the same device; where false, nothing is written but the average, which then comes nearer to
            the weights. None: whether this slice's gradient is ``finite``. Give that of the whole tensor to leave all
            of it alone. Not awaited by the host on a GPU.
        scale: 0-d factor of the gradient (clipping).
        rescale: 0-d factor of the masked update where the rule ``rescales``; None: from this slice alone.
    """
    numel = weight.numel()
    if numel == 0:
        return
    ok = finite(grad) if ok is None else ok
    leave = False
    if _readable(weight.device):
        leave, ok = not ok, None
        if leave and not spec.ema_decay:
            return
    c = spec.rule.coefficients(lr, step - spec.since)
    if spec.rule.rescales and rescale is None and not leave:
        rescale = mask_rescale(count_kept(spec, weight, grad, storage, lr=lr, step=step, scale=scale), numel)
    noise = None
    if _random(spec, weight, storage):
        noise = noise_of(spec.seed, step, [rows_from(offset, numel)] if rows is None else rows, weight.device)
    packed = noise is not None or any(storage[name].dtype != torch.float32 for name in spec.states)
    tile = _tile_size(spec, weight, storage)
    update = keep_tile if leave else update_tile
    if spec.compile and not leave:
        update = functools.partial(compiled.update_tile, tile // BLOCK)
    given = Given(c, noise, ok, scale, rescale, decay_at(spec.ema_decay, step))
    for start in range(0, numel, tile):
        stop = min(start + tile, numel)
        whole = start == 0 and stop == numel
        part = storage if whole else slice_storage(storage, start, stop, numel)
        if noise is not None and not whole:
            given = given._replace(noise=(noise[0][start // BLOCK : rows_of(stop)], noise[1]))
        arguments = (spec, weight[start:stop], grad[start:stop], part, given)
        if packed or spec.compile:
            in_rows(update, *arguments)
        else:
            update(*arguments)


@torch.no_grad()
def count_kept(
    spec: UpdateSpec, weight: Tensor, grad: Tensor, storage: Mapping[str, Tensor], *, lr: float, step: int,
    scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """How many elements of a slice the paper's mask would keep in this update (0-d); nothing is changed.

    Of ``storage`` only ``exp_avg`` and ``residual`` are looked at.
    """
    assert isinstance(spec.rule, AdamRule)
    numel, c = weight.numel(), spec.rule.coefficients(lr, step - spec.since)
    kept = torch.zeros((), dtype=torch.int64, device=weight.device)
    for start in range(0, numel, tile := _tile_size(spec, weight, storage)):
        stop = min(start + tile, numel)
        part = slice_storage(storage, start, stop, numel)
        kept += in_rows(kept_in_tile, spec, weight[start:stop], grad[start:stop], part, Given(c, scale=scale))
    return kept


def mask_rescale(kept: Tensor, numel: int) -> Tensor:
    """The paper's factor of a cautious update: one over the share of the ``numel`` elements that is kept (0-d)."""
    return 1 / (kept / numel).clamp(min=1e-3)


def _readable(device: torch.device) -> bool:
    """Whether the host may look at a result on ``device`` without waiting for it."""
    return device.type == "cpu"


def _signed(name: str) -> bool:
    return name != "exp_avg_sq"


def _random(spec: UpdateSpec, weight: Tensor, storage: Mapping[str, Tensor]) -> bool:
    if weight.dtype != torch.float32 and spec.weight_precision == "stochastic":
        return True
    for name in spec.states:
        kind = spec.format_of(storage, name)
        if kind.signed_noise if _signed(name) else kind.unsigned_noise:
            return True
    return False


def _tile_size(spec: UpdateSpec, weight: Tensor, storage: Mapping[str, Tensor]) -> int:
    if any(name.endswith(PER_UNIT) for name in storage):
        return POWER_UNIT
    # A tile's temporaries should stay in the cache: on a CPU that is worth a factor of five. On a GPU fewer, larger
    # tiles keep it busy, as large as 64 MB of temporaries allow.
    if weight.device.type == "cpu":
        return 1 << 18
    return 1 << 21 if len(spec.rule.states) == 2 else 1 << 20


@torch.no_grad()
def load_master_(weight: Tensor, storage: Mapping[str, Tensor], value: Tensor) -> None:
    """Set a flat weight (and its residual, if it has one) to the float32 ``value``."""
    assert value.dtype == torch.float32
    if "residual" in storage:
        split_(weight, storage["residual"], value)
    else:
        weight.copy_(value)

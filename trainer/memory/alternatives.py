"""What would fit where a run does not: other settings, in order of how little quality they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..config import AUTO, OptimizerConfig, RunConfig
from .machine import GIB

FORMATS = (("f32", "split"), ("f24", "split"), ("log16", "split"), ("log16", "stochastic"), ("int8", "split"),
           ("int8", "stochastic"))  # fmt: skip
"""State format and weight precision, the best in quality and dearest in memory first."""
AUTO_FORMATS = FORMATS[2:]
"""What is tried in turn where neither is asked for: never anything larger than the first."""
SHOWN = 3
"""Alternatives that are told, at most."""
NO_AVERAGE = "no average of the weights (ema_decay 0)"
Shapes = Sequence[tuple[int, int]]


def alternatives(
    config: RunConfig, shapes: Shapes, best: Callable[[RunConfig, Shapes], tuple[Any, bool, bool]]
) -> list[str]:
    """One sentence for each of the first settings that fit. ``best`` measures settings: see ``plan``."""
    found: dict[str, str] = {}
    for what, changed, sizes in _cheaper(config, shapes):
        c, enough_vram, enough_ram = best(changed, sizes)
        if not (enough_vram and enough_ram) or any(simpler in what for simpler in found):
            continue
        takes = f"{c.ram / GIB:.1f} GiB of RAM" + (f", {c.vram / GIB:.1f} GiB of VRAM" if c.vram else "")
        found[what] = f"{'so' if found else 'this'} would fit: {what} ({takes})"
        if what.endswith("same result") or len(found) == SHOWN:
            break
    return [*found.values()] or ["no setting makes it fit: it takes a GPU or a machine with more memory"]


def state_bytes(optimizer: OptimizerConfig) -> float:
    """Host bytes per parameter of what the optimizer keeps: its states, and the masters' residuals."""
    from .footprint import StageSize, groups_of

    stage = StageSize("single", tuple(groups_of([("x", 1 << 20)], optimizer)))
    return (stage.home - stage.weight) / stage.numel


def _cheaper(config: RunConfig, shapes: Shapes) -> Iterator[tuple[str, RunConfig, Shapes]]:
    """Settings that take less memory, the least loss of quality first."""
    pictures, memory = config.recipe.batch_size, config.memory
    free = replace(memory, blocks_to_swap=AUTO, activation_offload="auto")
    one = replace(free, micro_batch=1)
    if free != memory:
        names = [n for n in ("blocks_to_swap", "activation_offload") if getattr(free, n) != getattr(memory, n)]
        yield f"{' and '.join(names)} left to be decided; same result", replace(config, memory=free), shapes
    if pictures > 1 and memory.micro_batch != 1:
        yield "micro_batch 1, somewhat slower; same result", replace(config, memory=one), shapes
    if config.recipe.ema_decay:
        plain = replace(config.recipe, ema_decay=0.0)
        yield NO_AVERAGE, replace(config, memory=free, recipe=plain), shapes
        for what, changed, sizes in _cheaper(replace(config, recipe=plain), shapes):
            yield f"{what}, and {NO_AVERAGE}", changed, sizes
        return
    optimizers = [*_smaller(config.optimizer)]
    if config.optimizer.kind == "adan":
        nadam = replace(config.optimizer, kind="nadam", betas=(0.9, 0.999))
        optimizers += [(f"NAdam instead of Adan, {how}", o) for how, o in [("as it is", nadam), *_smaller(nadam)]]
    for what, optimizer in optimizers:
        yield what, replace(config, memory=free, optimizer=optimizer), shapes
    half = [(max(h // 2, 1), max(w // 2, 1)) for h, w in shapes]
    yield "pictures of half the resolution", replace(config, memory=one), half
    for what, optimizer in optimizers:
        yield f"{what}, and micro_batch 1", replace(config, memory=one, optimizer=optimizer), shapes
    batch = replace(config.recipe, batch_size=1)
    for what, optimizer in [("", config.optimizer), *((f"{w}, ", o) for w, o in optimizers)]:
        changed = replace(config, memory=free, optimizer=optimizer, recipe=batch)
        yield f"{what}batch_size 1", changed, shapes
        yield f"{what}batch_size 1 and pictures of half the resolution", changed, half


def _smaller(optimizer: OptimizerConfig) -> Iterator[tuple[str, OptimizerConfig]]:
    """The same optimizer in formats that take less, the best first."""
    now = state_bytes(optimizer) + (4 if optimizer.weight_precision == "f32" else 2)
    for state_format, precision in FORMATS:
        changed = replace(optimizer, state_format=state_format, weight_precision=precision)
        if state_bytes(changed) + 2 < now - 0.01:
            yield f"state_format {state_format} with weight_precision {precision}", changed

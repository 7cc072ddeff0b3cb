"""Will it fit, and what has to live in host memory? Decided from sizes alone, before anything is loaded.

All figures are bytes unless a name says GiB.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import AUTO, RunConfig
from . import disk
from .alternatives import alternatives
from .machine import DESKTOP, GIB, Machine, this_machine

if TYPE_CHECKING:
    from ..flux.variants import FileInfo
    from .footprint import Footprint, Stages

TEXT_TOKENS = {"dev": 512, "schnell": 256}
"""Text tokens per picture that the plan assumes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided for a run, and the memory it is expected to take."""

    device: str
    """``cpu`` or ``cuda:N``."""
    blocks_to_swap: int
    """Blocks that live in host memory between uses."""
    activation_offload: bool
    """Whether the blocks' inputs wait in host memory during a step."""
    micro_batch: int
    """Pictures that pass a block at once; 0: all."""
    fits: bool
    """Whether VRAM and RAM are enough."""
    vram_gb: float
    """GiB of VRAM at the peak of a step; 0 on a CPU."""
    ram_gb: float
    """GiB of host memory at the peak."""
    pinned_gb: float = 0.0
    """GiB of those that are pinned."""
    disk_gb: float = 0.0
    """GiB of disk that a run takes at most: save points (the one that is kept goes when the newer is whole),
    checkpoints, one bf16 export and what is encoded."""
    state_format: str = ""
    weight_precision: str = ""
    step_seconds: float | None = None
    """Seconds that a step should take by the machine's speeds; None where they are not known."""
    waits_for: str = ""
    """What sets the pace: ``arithmetic``, ``up`` (copies to the GPU), ``down`` (copies back) or ``memory``."""
    enough_ram: bool = True
    """Whether RAM alone is enough."""
    blocks: int = 0
    """Blocks that could be swapped."""
    pictures: int = 0
    """Pictures per update."""
    items: dict[str, float] = field(default_factory=dict)
    """GiB by what takes it; ``GPU:`` and ``disk:`` stand before what is not host memory. What is ``left to`` others is
    part of neither ``vram_gb`` nor ``ram_gb``, but has to be there."""
    reasons: tuple[str, ...] = ()
    """Why it was decided so, and what to do if it does not fit: one sentence each."""


def resolve(
    config: RunConfig,
    info: FileInfo,
    shapes: Sequence[tuple[int, int]],
    machine: Machine | None = None,
    *,
    explain: bool = True,
    folder: Path | None = None,
) -> Plan:
    """The plan for a run on latents of ``shapes`` (h, w). ``machine`` stands in for this one.

    ``explain``: where it does not fit, say what would. ``folder``: where the run is, or will be.
    """
    machine = machine or this_machine(config.memory.device, config.memory.reserve_vram_gb, folder=folder)
    chosen, enough_vram, enough_ram = _best(config, info, shapes, machine)
    reasons = list(_why(config, chosen, machine, enough_vram, enough_ram))
    if explain and not (enough_vram and enough_ram):
        reasons += alternatives(config, shapes, lambda changed, sizes: _best(changed, info, sizes, machine))
    seconds, waits_for = _pace(config, info, shapes, chosen, machine)
    items = {f"GPU: {name}": size for name, size in chosen.size.vram.items()} | chosen.size.ram
    takes = disk.needed(config, info, shapes, chosen.stages, TEXT_TOKENS.get(info.variant, 512))
    reasons += disk.told(config, takes, machine.disk_free)
    items |= takes | {"left to ComfyUI and the desktop": DESKTOP}
    if machine.device != "cpu":
        items["GPU: left to the desktop"] = int(config.memory.reserve_vram_gb * GIB)
    return Plan(
        device=machine.device,
        blocks_to_swap=chosen.swap,
        activation_offload=chosen.offload,
        micro_batch=chosen.micro if chosen.micro < config.recipe.batch_size else config.memory.micro_batch,
        fits=enough_vram and enough_ram,
        vram_gb=round(sum(chosen.size.vram.values()) / GIB, 2),
        ram_gb=round(sum(chosen.size.ram.values()) / GIB, 2),
        pinned_gb=round(min(chosen.size.pinned, _pinnable(machine)) / GIB, 2),
        disk_gb=round(sum(takes.values()) / GIB, 2),
        state_format=config.optimizer.state_format,
        weight_precision=config.optimizer.weight_precision,
        enough_ram=enough_ram,
        blocks=len(chosen.stages.body),
        pictures=config.recipe.batch_size,
        step_seconds=seconds,
        waits_for=waits_for,
        items={name: round(size / GIB, 3) for name, size in items.items()},
        reasons=tuple(reasons),
    )


@dataclass(frozen=True)
class _Choice:
    """One way to run it."""

    swap: int
    offload: bool
    micro: int
    size: Footprint
    stages: Stages

    @property
    def vram(self) -> int:
        return sum(self.size.vram.values())

    @property
    def ram(self) -> int:
        return sum(self.size.ram.values())

    @property
    def moved(self) -> int:
        return self.size.up + self.size.down


def _tokens(info: FileInfo, shapes: Sequence[tuple[int, int]]) -> int:
    """Tokens of the largest picture with its caption."""
    return max(-(-h // 2) * -(-w // 2) for h, w in shapes) + TEXT_TOKENS.get(info.variant, 512)


def _best(
    config: RunConfig, info: FileInfo, shapes: Sequence[tuple[int, int]], machine: Machine
) -> tuple[_Choice, bool, bool]:
    """The choice that moves the least in a step among those that fit; else the one that comes nearest."""
    from .footprint import footprint, stage_sizes

    assert info.flux is not None
    flux, stages = info.flux, stage_sizes(info.flux, config.optimizer, ema=config.recipe.ema_decay > 0)
    count, memory, on_gpu = len(stages.body), config.memory, machine.device != "cpu"
    pictures = config.recipe.batch_size
    micro, tokens = min(memory.micro_batch or pictures, pictures), _tokens(info, shapes)

    def choice(swap: int, offload: bool) -> _Choice:
        size = footprint(
            stages,
            swap=swap,
            offload=offload,
            on_gpu=on_gpu,
            pictures=pictures,
            micro=micro,
            tokens=tokens,
            hidden=flux["hidden_size"],
            compute=4 if config.optimizer.weight_precision == "f32" else 2,
        )
        return _Choice(swap, offload, micro, size, stages)

    def over_vram(c: _Choice) -> int:
        return max(c.vram - machine.vram_free, 0) if on_gpu else 0

    def over_ram(c: _Choice) -> int:
        return max(c.ram - machine.ram_free, 0)

    choices = []
    for offload in {"on": [True], "off": [False], "auto": [False, True] if on_gpu else [False]}[
        memory.activation_offload
    ]:
        if memory.blocks_to_swap != AUTO or not on_gpu:
            choices.append(choice(min(max(memory.blocks_to_swap, 0), count), offload))
            continue
        # Swapping more never takes more VRAM: the fewest that fit.
        fewest = bisect_left(range(count), True, key=lambda swap, o=offload: not over_vram(choice(swap, o)))
        choices.append(choice(fewest, offload))
    best = min(choices, key=lambda c: (over_vram(c), over_ram(c), c.moved))
    return best, not over_vram(best), not over_ram(best)


def _why(config: RunConfig, c: _Choice, machine: Machine, enough_vram: bool, enough_ram: bool) -> Iterator[str]:
    if machine.device != "cpu" and enough_vram:
        yield (
            f"{c.swap} of {len(c.stages.body)} blocks wait in host memory, activations "
            f"{'too' if c.offload else 'stay on the GPU'}: the least to move that fits "
            f"{machine.vram_free / GIB:.1f} GiB of VRAM"
        )
    elif machine.device != "cpu":
        yield f"a step needs {c.vram / GIB:.1f} GiB of VRAM and {machine.vram_free / GIB:.1f} GiB are left to it"
    if not enough_ram:
        yield (
            f"training needs {c.ram / GIB:.1f} GiB of RAM and {machine.ram_free / GIB:.1f} GiB are left to it "
            "(the rest is for the system, ComfyUI and the desktop)"
        )
    elif machine.ram_now is not None and c.ram > machine.ram_now:
        yield (
            f"{machine.ram_now / GIB:.1f} GiB of RAM are free at this moment, {c.ram / GIB:.1f} GiB are needed: "
            "close other programs and runs before training"
        )
    if enough_ram and c.size.pinned > _pinnable(machine):
        yield (
            f"{_pinnable(machine) / GIB:.0f} of {c.size.pinned / GIB:.0f} GiB can be pinned here: the rest is copied "
            f"once more on its way, which costs the host's memory some {2 * c.moved / GIB:.0f} GiB of traffic a step"
        )


def _pinnable(machine: Machine) -> int:
    return machine.ram_free if machine.pinnable is None else machine.pinnable


def _pace(
    config: RunConfig, info: FileInfo, shapes: Sequence[tuple[int, int]], c: _Choice, machine: Machine
) -> tuple[float | None, str]:
    """Seconds of a step and what it waits for, by the event model."""
    if machine.device == "cpu" or not machine.speeds.known:
        return None, ""
    from . import timing

    assert info.flux is not None
    work = timing.step_work(
        info.flux,
        c.stages,
        swap=c.swap,
        offload=c.offload,
        pictures=config.recipe.batch_size,
        tokens=_tokens(info, shapes),
        text=TEXT_TOKENS.get(info.variant, 512),
    )
    found = timing.simulate(work, machine.speeds)
    return round(found.seconds, 2), found.waits_for


def tighter(plan: Plan, resolve_with: Callable[..., Plan]) -> Plan | None:
    """A plan that takes less VRAM than ``plan``, which was too much; None if there is none.

    ``resolve_with(**memory)`` plans with those memory settings. More blocks are swapped and activations offloaded; once
    all are, fewer pictures pass at once.
    """
    now, blocks = plan.micro_batch or plan.pictures, plan.blocks
    more = min(plan.blocks_to_swap + max(2, blocks // 8), blocks)
    offloads = ["on"] if plan.activation_offload else ["on", "off"]
    tries = [(more, offload, now) for offload in offloads]
    tries += [(blocks, offload, max(1, now // 2)) for offload in offloads]
    for swap, offload, micro in tries:
        if (swap, offload == "on", micro) == (plan.blocks_to_swap, plan.activation_offload, now):
            continue
        found = resolve_with(blocks_to_swap=swap, activation_offload=offload, micro_batch=micro)
        if found.enough_ram:
            return dataclasses.replace(found, reasons=("the plan before ran out of VRAM", *found.reasons))
    return None


def key(config: RunConfig, shapes: Sequence[tuple[int, int]], machine: str) -> str:
    """What a recorded plan is good for: the settings, the pictures' sizes and the machine that it was made for."""
    what = {
        "memory": dataclasses.asdict(config.memory),
        "formats": [config.optimizer.kind, config.optimizer.state_format, config.optimizer.weight_precision],
        "ema": config.recipe.ema_decay > 0,
        "batch_size": config.recipe.batch_size,
        "shapes": sorted({tuple(shape) for shape in shapes}),
        "machine": machine,
    }
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON types."""
    return dataclasses.asdict(plan) | {"reasons": list(plan.reasons)}


def from_dict(data: dict[str, Any]) -> Plan:
    """The plan that ``to_dict`` was given. ``TypeError`` if another version's fields are needed."""
    known = {f.name for f in dataclasses.fields(Plan)}
    values: dict[str, Any] = {k: tuple(v) if k == "reasons" else v for k, v in data.items() if k in known}
    return Plan(**values)

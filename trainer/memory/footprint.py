"""What the engine allocates, from sizes alone: each stage's arena, the buffers it shares, what passes through.

The counterpart of ``arena.py`` and ``conveyor.py``; a test compares it with what they really take. All figures are
bytes. Where one is a guess it is a high one, since a plan that is too tight costs a run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..config import OptimizerConfig
from ..flux.model import trainable_dtype
from ..flux.sizes import shapes_of
from ..optim.average import AVERAGE
from ..optim.base import SMALL, spec_from_config, storage_layout
from . import arena, averaged, conveyor
from .machine import GIB

ACTIVATIONS = 42
"""Values per token and hidden unit at the peak of a double block's backward pass: measured, 40 (a single block: 34),
of which autograd saves 29; the rest is on its way."""
PROCESS_CPU, PROCESS_GPU = 300 << 20, 2 * GIB
"""Host memory of the process itself: Python, torch, its libraries, and the GPU driver's part."""
UPDATE_CPU, UPDATE_GPU = 16 << 20, 128 << 20
"""Temporaries of an update: those of a tile."""
DRIVER = int(0.7 * GIB)
"""VRAM that the GPU's driver and libraries take."""
KEPT = {"residual": "residuals", AVERAGE: "average of the weights"}
"""What is kept beside the weights that is no optimizer's state."""
SLACK = 0.05
"""Share of the VRAM that the allocator wastes between blocks of different sizes."""


@dataclass(frozen=True)
class GroupSize:
    """A ``Group``: its label, elements, bytes of weights, and bytes of each tensor of its storage."""

    label: str
    numel: int
    weight: int
    storage: tuple[tuple[str, int], ...]

    @property
    def home(self) -> int:
        """Bytes of its home buffer."""
        return self.weight + sum(size for _, size in self.storage)


@dataclass(frozen=True)
class StageSize:
    """A stage's arena. ``kind`` is ``embed``, ``double``, ``single`` or ``head``; those of a kind are alike."""

    kind: str
    groups: tuple[GroupSize, ...]

    @property
    def weight(self) -> int:
        """Bytes of its weights."""
        return sum(g.weight for g in self.groups)

    @property
    def home(self) -> int:
        """Bytes of its home buffers."""
        return sum(g.home for g in self.groups)

    @property
    def numel(self) -> int:
        """Elements, gaps included."""
        return sum(g.numel for g in self.groups)


class Stages:
    """The stages of a Flux in the order of the walk, and what they take together whatever is swapped."""

    def __init__(self, stages: Sequence[StageSize]):
        self.all = tuple(stages)
        self.body = self.all[1:-1]
        self.home = sum(s.home for s in stages)
        self.weight = sum(s.weight for s in stages)
        self.numel = sum(s.numel for s in stages)
        kinds = {s.kind: s for s in stages}.values()
        groups = [g for s in kinds for g in s.groups]
        self.spare_home = sum({(g.label, g.numel): g.home for g in groups}.values())
        """An update writes into a spare buffer of each layout."""
        self.largest = max(s.weight for s in kinds)
        labels = {g.label for g in groups}
        self.gradients = sum(4 * max(g.numel for g in groups if g.label == label) for label in labels)
        self.storage = Counter[str]()
        for s in stages:
            for g in s.groups:
                for name, size in g.storage:
                    kept = name.partition(".")[0]
                    self.storage[KEPT.get(kept, "optimizer states")] += size

    def slots(self, swap: int, on_gpu: bool) -> tuple[int, int]:
        """Bytes of the first ``swap`` blocks that are on the device at once, and of the spare buffers of weights."""
        swapped = self.body[:swap]
        counts = Counter(s.kind for s in swapped)
        here = sum(min(counts[s.kind], conveyor.AHEAD + 1) * s.weight for s in {s.kind: s for s in swapped}.values())
        # Where the weights are used at home, the spare home is their spare buffer too.
        kinds = {s.kind: s for s in (self.all if on_gpu else swapped)}.values()
        return here, sum({(g.label, g.numel): g.weight for s in kinds for g in s.groups}.values())

    @cached_property
    def state_slots(self) -> int:
        """Bytes of the device's buffers for states on their way, by following the conveyor through a step."""
        return _state_slots(self.all, conveyor.RING_BYTES, arena.CHUNK)


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device and in host memory by what takes them, and moved each way in a step."""

    vram: dict[str, int]
    ram: dict[str, int]
    pinned: int
    up: int
    down: int


def stage_sizes(flux: dict[str, Any], optimizer: OptimizerConfig, *, ema: bool = False) -> Stages:
    """The stages of a Flux under an optimizer; ``ema``: with a running average of the weights."""
    fields = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in flux.items()))
    return _stage_sizes(fields, optimizer, ema)


@lru_cache(maxsize=64)
def _stage_sizes(fields: tuple, optimizer: OptimizerConfig, ema: bool) -> Stages:
    flux = dict(fields)
    shapes = shapes_of({**flux, "depth": min(flux["depth"], 1), "depth_single_blocks": 1})
    kinds: dict[str, list[tuple[str, int]]] = {"embed": [], "double": [], "single": [], "head": []}
    prefixes = {"double": "double", "single": "single", "final_": "head"}
    for name, shape in shapes.items():
        kinds[prefixes.get(name[:6], "embed")].append((name, math.prod(shape)))
    sizes = {kind: StageSize(kind, tuple(groups_of(named, optimizer, ema=ema))) for kind, named in kinds.items()}
    body = [sizes["double"]] * flux["depth"] + [sizes["single"]] * flux["depth_single_blocks"]
    return Stages([sizes["embed"], *body, sizes["head"]])


def groups_of(
    named: Sequence[tuple[str, int]], optimizer: OptimizerConfig, *, ema: bool = False
) -> Iterator[GroupSize]:
    """As ``Arena`` and ``Group`` divide them."""
    base = torch.float32 if optimizer.weight_precision == "f32" else torch.bfloat16
    spec = spec_from_config(optimizer, 0, ema_decay=0.5 if ema else 0.0)
    kinds: dict[tuple[torch.dtype, bool], int] = {}
    for name, numel in named:
        kind = (trainable_dtype(name, base), numel <= SMALL)
        kinds[kind] = kinds.get(kind, 0) + arena.aligned(numel)
    for (dtype, small), numel in kinds.items():
        own = replace(spec, state_format=dict.fromkeys(spec.states, "f32")) if small else spec
        storage = storage_layout(own, numel, dtype)
        parts = tuple((name, math.prod(shape) * kind.itemsize) for name, (kind, shape) in storage.items())
        yield GroupSize(f"{dtype}.{'small' if small else 'large'}", numel, numel * dtype.itemsize, parts)


def footprint(
    stages: Stages,
    *,
    swap: int,
    offload: bool,
    on_gpu: bool,
    pictures: int,
    micro: int,
    tokens: int,
    hidden: int,
    compute: int,
) -> Footprint:
    """What a run takes with its first ``swap`` blocks swapped.

    ``pictures`` of ``tokens`` (text and picture) pass in parts of ``micro``; ``compute``: bytes per value in a stream.
    """
    moved = sum(s.weight for s in stages.body[:swap])
    here, spare = stages.slots(swap, on_gpu)
    stream = tokens * hidden * compute  # of one picture
    inputs = pictures * stream * len(stages.body)
    offload = offload and on_gpu
    working = {
        "weight slots": here + spare,
        "gradients of one block": stages.gradients,
        "gradients being made": stages.largest,
        "activations of one block": micro * stream * ACTIVATIONS,
        # The outputs of the last block stay until the step's end, and a gradient of that size walks back.
        "hidden streams": 2 * pictures * stream,
        "block inputs": inputs if not offload else 8 * micro * stream,
    }
    ram = {"weights": stages.weight, **stages.storage, "spare host buffers": stages.spare_home}
    if not on_gpu:
        ram |= {name: size for name, size in working.items() if size}
        return Footprint({}, ram | {"update": UPDATE_CPU, "process": PROCESS_CPU}, 0, 0, 0)
    kept = inputs if offload else 0
    if offload:
        ram["block inputs"] = inputs
    pinned = sum(ram.values())
    vram = {"resident weights": stages.weight - moved} | working
    vram |= {"state slots": stages.state_slots, "update": UPDATE_GPU, "driver": DRIVER}
    if KEPT[AVERAGE] in stages.storage:  # only while it predicts
        vram["average on its way"] = averaged.WINDOW * arena.CHUNK * 4
    vram["allocator reserve"] = int(SLACK * sum(vram.values()))
    states = sum(stages.storage.values())
    # What is in the slots when the forward pass ends stays for the backward, and from one step to the next.
    up, down = 2 * (moved - here) + states + kept, moved + states + kept
    return Footprint(vram, ram | {"process": PROCESS_GPU}, pinned, up, down)


@lru_cache(maxsize=64)
def _state_slots(stages: tuple[StageSize, ...], ring: int, chunk: int) -> int:
    wanted: deque[tuple[Any, int]] = deque()
    for stage in [stages[-1], *reversed(stages[:-1])]:
        for g in stage.groups:
            per_element = sum(size for _, size in g.storage) / g.numel
            for start in range(0, g.numel, chunk):
                numel = min(chunk, g.numel - start)
                wanted.append(((g.label, numel), math.ceil(per_element * numel)))
    coming: deque[tuple[Any, int]] = deque()
    now, most, used = Counter[Any](), dict[Any, tuple[int, int]](), 0
    while wanted or coming:
        while wanted and not (coming and used + wanted[0][1] > ring):
            kind, size = wanted.popleft()
            coming.append((kind, size))
            used, now[kind] = used + size, now[kind] + 1
            most[kind] = max(most.get(kind, (0, 0)), (now[kind], size))
        kind, size = coming.popleft()
        used, now[kind] = used - size, now[kind] - 1
    return sum(count * size for count, size in most.values())

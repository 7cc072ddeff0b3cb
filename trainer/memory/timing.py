"""How long a step takes: an event model of the three streams, fed by a machine's speeds.

``schedule`` knows streams and events only. ``step_operations`` puts a step on them in the order in which the conveyor
does, in coarser pieces. Left out: what an update itself takes (its passes over the GPU's memory), launches, and the
host's own work; so the model's figure is a floor that a good engine comes near to, and is to be quoted as modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import conveyor
from .footprint import Stages, StageSize
from .machine import Speeds
from .streams import COMPUTE, DOWN, UP

PIECE = 1 << 26
"""Elements whose states the model moves at once."""
TEXT = 512
"""Text tokens among a picture's tokens."""
WAITING = 0.1
"""Share of a step that the arithmetic may wait before its pace is said to be set by the copies."""


@dataclass(frozen=True)
class Operation:
    """Something on a stream that takes ``seconds`` and starts after the operations numbered ``after``."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """When each operation ends, and how long the arithmetic waited for each of the other streams."""

    ends: tuple[float, ...]
    waited: dict[str, float]


@dataclass(frozen=True)
class Pace:
    """``seconds`` of a step, those of pure arithmetic, and what the rest is spent waiting for."""

    seconds: float
    arithmetic: float
    waits_for: str
    """``arithmetic``, ``up``, ``down``, or ``memory`` where the host's memory is what slows the copies."""


@dataclass(frozen=True)
class StepWork:
    """What a step has to do."""

    stages: Stages
    swap: int
    forward: tuple[float, ...]
    """Operations of each stage on the way out, for the whole batch."""
    backward: tuple[float, ...]
    """On the way back: computed again, and differentiated."""
    kept: int
    """Bytes of a block's inputs that go to the host and come back; 0 where they stay."""


def schedule(operations: Sequence[Operation]) -> Schedule:
    """Run each stream's operations in order, each as soon as its stream is free and what it needs is there."""
    free: dict[str, float] = {}
    ends: list[float] = []
    waited = {UP: 0.0, DOWN: 0.0}
    for operation in operations:
        idle = free.get(operation.stream, 0.0)
        last = max(operation.after, key=lambda i: ends[i], default=None)
        start = idle if last is None else max(idle, ends[last])
        if operation.stream == COMPUTE and last is not None and start > idle:
            waited[operations[last].stream] += start - idle
        ends.append(start + operation.seconds)
        free[operation.stream] = ends[-1]
    return Schedule(tuple(ends), waited)


def operations_of(flux: dict[str, Any], picture: int, text: int) -> dict[str, tuple[float, float]]:
    """Floating-point operations of a stage of each kind on the way out and on the way back, for one picture.

    Matrix products cost 2 each way out and again when recomputed, and 4 backwards; attention (4 L^2 C) 2.5 times as
    much backwards as forwards, as flash attention computes it again.
    """
    c, mlp = flux["hidden_size"], int(flux["hidden_size"] * flux["mlp_ratio"])
    length = picture + text
    products = {
        "embed": 2.0 * (picture * flux["in_channels"] + text * flux["context_in_dim"]) * c,
        "double": 2.0 * length * (4 * c * c + 2 * c * mlp),
        "single": 2.0 * length * (c * (3 * c + mlp) + (c + mlp) * c),
        "head": 2.0 * picture * c * flux["out_channels"],
    }
    attention = {"double": 4.0 * length * length * c, "single": 4.0 * length * length * c}
    out = {}
    for kind, work in products.items():
        extra = attention.get(kind, 0.0)
        out[kind] = (work + extra, 3 * work + 3.5 * extra)
    return out


def step_work(
    flux: dict[str, Any], stages: Stages, *, swap: int, offload: bool, pictures: int, tokens: int, text: int = TEXT
) -> StepWork:
    """The work of a step on ``pictures`` of ``tokens``, ``text`` among them. Micro-batches change none of it."""
    work = operations_of(flux, tokens - text, text)
    kinds = [s.kind for s in stages.all]
    kept = pictures * tokens * flux["hidden_size"] * 2 if offload else 0
    forward = tuple(pictures * work[kind][0] for kind in kinds)
    return StepWork(stages, swap, forward, tuple(pictures * work[kind][1] for kind in kinds), kept)


def simulate(work: StepWork, speeds: Speeds, steps: int = 3) -> Pace:
    """The pace of the last of ``steps`` steps, when the slots hold what a step leaves in them."""
    up, down = speeds.h2d * 1e9, speeds.d2h * 1e9
    held = speeds.dram and speeds.dram * 1e9 < up + down
    if held:  # both directions share the host's memory, and what one does not take is the other's
        dram = speeds.dram * 1e9
        up, down = min(up, max(dram / 2, dram - down)), min(down, max(dram / 2, dram - up))
    builder = _Builder(work, speeds.tflops * 1e12, up, down)
    marks = []
    for _ in range(steps):
        builder.step()
        marks.append(len(builder.operations))
    found = schedule(builder.operations)

    def until(mark: int) -> float:
        return max(end for end, op in zip(found.ends[:mark], builder.operations, strict=False) if op.stream == COMPUTE)

    seconds = until(marks[-1]) - (until(marks[-2]) if steps > 1 else 0.0)
    arithmetic = (sum(work.forward) + sum(work.backward)) / (speeds.tflops * 1e12)
    worst = max(found.waited, key=lambda name: found.waited[name])
    waits_for = "arithmetic" if seconds <= (1 + WAITING) * arithmetic else "memory" if held else worst
    return Pace(seconds, arithmetic, waits_for)


class _Builder:
    """Puts steps on the streams as ``Conveyor``, ``Keeper`` and ``Group.step`` do."""

    def __init__(self, work: StepWork, rate: float, up: float, down: float):
        self.work, self.rate, self.up, self.down = work, rate, up, down
        self.operations: list[Operation] = []
        self.stages: tuple[StageSize, ...] = work.stages.all
        self.here: dict[int, int] = {}
        """Swapped stages on the device: the operation that brought them."""
        self.busy: dict[int, tuple[int, ...]] = {}
        """By stage: what must be over before its slot is written."""
        self.home: dict[int, int] = {}
        """By stage: the operation that wrote it home last."""
        self.wanted: deque[tuple[int, int]] = deque()
        self.coming: deque[tuple[int, int, int]] = deque()
        self.used, self.freed = 0, deque[int]()
        self.route: deque[int] = deque()

    def add(self, stream: str, seconds: float, *after: int | None) -> int:
        self.operations.append(Operation(stream, seconds, tuple(a for a in after if a is not None)))
        return len(self.operations) - 1

    def step(self) -> None:
        body = range(len(self.stages) - 1)
        back = range(len(self.stages) - 1, -1, -1)
        self.route = deque([*body, *back])
        for i in back:
            states = self.stages[i].home - self.stages[i].weight
            for start in range(0, self.stages[i].numel, PIECE):
                part = min(PIECE, self.stages[i].numel - start) / self.stages[i].numel
                self.wanted.append((i, int(states * part)))
        kept: dict[int, int] = {}
        last: int | None = None
        for i in body:
            self.visit(i)
            if i and self.work.kept:
                kept[i] = self.add(DOWN, self.work.kept / self.down, last)
            last = self.add(COMPUTE, self.work.forward[i] / self.rate, self.here.get(i), kept.get(i - 3))
            self.busy[i] = (last,)
        brought: dict[int, int] = {}
        for i in back:
            self.visit(i)
            for j in (i, i - 1):
                if j in kept and j not in brought:
                    brought[j] = self.add(UP, self.work.kept / self.up, kept[j])
            self.add(COMPUTE, self.work.backward[i] / self.rate, self.here.get(i), brought.get(i))
            self.update(i)

    def visit(self, i: int) -> None:
        self.route.popleft()
        if self.swapped(i) and i not in self.here:
            self.bring(i)
        ahead = next((j for j in self.route if self.swapped(j) and j != i), None)
        if ahead is not None and ahead not in self.here:
            self.bring(ahead, keep=(i, ahead))
        self.fill()

    def swapped(self, i: int) -> bool:
        return 1 <= i <= self.work.swap

    def bring(self, i: int, keep: tuple[int, ...] = ()) -> None:
        same = [j for j in self.here if self.stages[j].kind == self.stages[i].kind]
        after: tuple[int, ...] = ()
        if len(same) > conveyor.AHEAD:
            order = list(self.route)
            idle = [j for j in same if j not in keep]
            gone = max(idle, key=lambda j: order.index(j) if j in order else len(order))
            del self.here[gone]
            after = self.busy[gone]
        self.here[i] = self.add(UP, self.stages[i].weight / self.up, self.home.get(i), *after)

    def fill(self) -> None:
        while self.wanted:
            i, size = self.wanted[0]
            if self.coming and self.used + size > conveyor.RING_BYTES:
                return
            self.wanted.popleft()
            after = self.freed.popleft() if self.freed else None
            self.coming.append((i, size, self.add(UP, size / self.up, after)))
            self.used += size

    def update(self, i: int) -> None:
        while (self.coming and self.coming[0][0] == i) or (self.wanted and self.wanted[0][0] == i):
            self.fill()
            _, size, arrived = self.coming.popleft()
            done = self.add(COMPUTE, 0.0, arrived)
            self.freed.append(self.add(DOWN, size / self.down, done))
            self.used -= size
            self.fill()
        last = len(self.operations) - 1
        if self.swapped(i):
            done = self.add(COMPUTE, 0.0)
            self.home[i] = self.add(DOWN, self.stages[i].weight / self.down, done)
            last = self.home[i]
        self.busy[i] = (last,)

"""Streams that make the worst of every freedom they are given.

Copies on the side streams run as late as their events allow, over memory poisoned with NaN; every
access is checked against vector clocks, so that work which nothing orders is found whichever way it
happens to run. ``without`` leaves out one kind of wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from trainer.memory.streams import COMPUTE, DOWN, UP, Buffer, Streams

SIDE = (UP, DOWN)


class Race(AssertionError):
    """Two streams touch the same memory and nothing says which comes first."""


@dataclass
class FakeEvent:
    stream: str
    clock: dict[str, int]
    done: bool = False


@dataclass
class Accesses:
    """The last write of a tensor's memory, and the reads since: stream and its time."""

    write: tuple[str, int] | None = None
    reads: list[tuple[str, int]] = field(default_factory=list)


def poison(tensor: torch.Tensor) -> None:
    """NaN, or for whole numbers something that no state is."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 85)


def _memory(buffers: Iterable[Buffer]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for buffer in buffers for tensor in buffer.tensors.values()}


class FakeStreams(Streams):
    staged = True

    def __init__(self, without: tuple[str, int] | None = None):
        self.without = without
        self.kinds: set[tuple[str, int]] = set()
        """Every kind of wait that was needed: the stream that waits, and the line that asks for it."""
        self._queues: dict[str, list[tuple]] = {name: [] for name in SIDE}
        self._clocks = {name: dict.fromkeys((UP, COMPUTE, DOWN), 0) for name in (UP, COMPUTE, DOWN)}
        self._accesses: dict[int, Accesses] = {}
        self._told: tuple[set[int], set[int]] = (set(), set())
        """What the work of the moment says that it reads and writes."""

    @contextmanager
    def use(self, stream, *, reads=(), writes=()):
        with super().use(stream, reads=reads, writes=writes):
            self._clocks[stream][stream] += 1
            for buffer in reads:
                self._touch(stream, buffer, writes=False)
            for buffer in writes:
                self._touch(stream, buffer, writes=True)
                if stream == UP:
                    self._queues[UP].append(("poison", list(buffer.tensors.values())))
            outer, self._told = self._told, (_memory(reads), _memory(writes))
            try:
                yield
            finally:
                self._told = outer

    def _touch(self, stream: str, buffer: Buffer, *, writes: bool) -> None:
        now = self._clocks[stream]
        for tensor in buffer.tensors.values():
            seen = self._accesses.setdefault(tensor.untyped_storage().data_ptr(), Accesses())
            if stream == DOWN and not writes and seen.write is None:
                raise Race(f"{stream} takes away what nobody is known to have made")
            for other, time in [*([seen.write] if seen.write else []), *(seen.reads if writes else [])]:
                if other != stream and now[other] < time:
                    raise Race(f"{stream} and {other}")
            if writes:
                seen.write, seen.reads = (stream, now[stream]), []
            else:
                seen.reads.append((stream, now[stream]))

    def copy(self, stream, target, source):
        if stream in SIDE:
            for tensor, told in zip((source, target), self._told, strict=True):
                if tensor.untyped_storage().data_ptr() not in told:
                    raise Race(f"{stream} copies what it has not been told of")
            self._queues[stream].append(("copy", target.detach(), source.detach()))
        else:
            target.copy_(source)

    def wait(self, stream, event):
        if event is None or event.stream == stream:
            return
        kind = (stream, sys._getframe(1).f_lineno)
        self.kinds.add(kind)
        if kind == self.without:
            return
        for name, time in event.clock.items():
            self._clocks[stream][name] = max(self._clocks[stream][name], time)
        if stream in SIDE:
            self._queues[stream].append(("wait", event))
        else:
            self._run_until(event)

    def record(self, stream):
        event = FakeEvent(stream, dict(self._clocks[stream]), done=stream not in SIDE)
        if stream in SIDE:
            self._queues[stream].append(("record", event))
        return event

    def release(self, buffer):
        super().release(buffer)
        for name in list(buffer.tensors):
            tensor = buffer.tensors.pop(name)
            if sys.getrefcount(tensor) <= 2:  # nobody else has it: its memory is the next one's
                poison(tensor)
                self._accesses.pop(tensor.untyped_storage().data_ptr(), None)

    def let_go(self, buffer):
        for event in (buffer.written, *buffer.read.values()):
            if event is not None:
                self._run_until(event)
        for tensor in buffer.tensors.values():
            poison(tensor)
            self._accesses.pop(tensor.untyped_storage().data_ptr(), None)

    def synchronize(self):
        for name in SIDE:
            while self._queues[name]:
                self._run_one(name)
        for clock in self._clocks.values():
            clock.update({name: self._clocks[name][name] for name in clock})

    def _run_until(self, event: FakeEvent) -> None:
        while not event.done:
            self._run_one(event.stream)

    def _run_one(self, name: str) -> None:
        what, *rest = self._queues[name].pop(0)
        if what == "copy":
            rest[0].copy_(rest[1])
        elif what == "poison":
            for tensor in rest[0]:
                poison(tensor)
        elif what == "record":
            rest[0].done = True
        else:
            self._run_until(rest[0])

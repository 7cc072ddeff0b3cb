"""Streams that copy and compute at the same time, and the order between them.

Work is put on one of three streams: ``UP`` (host to device), ``COMPUTE`` and ``DOWN`` (device to
host). A stream runs its own work in order; between streams the order comes from what the work
touches: every ``Buffer`` remembers who wrote it last and who has read it since, and ``use`` waits
for the ones that matter. So each arrow between the streams has its event, and none is written by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .pinned import Landed, PinnedMemory, Staging, cuda_register

UP, COMPUTE, DOWN = "up", "compute", "down"
Event = Any
MEASURED = 1 << 14
"""Waits of the compute stream that are remembered until someone asks."""


class Buffer:
    """Tensors that are written and read together, by whichever stream's turn it is."""

    __slots__ = ("read", "tensors", "written")

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = dict(tensors)
        self.written: Event | None = None
        """When the last write is over."""
        self.read: dict[str, Event] = {}
        """By stream: when its last read since then is over."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class Streams:
    """The CPU's: host and device are the same memory, and everything is done at once and in order."""

    staged = False
    """Whether the device has memory of its own, so that states must be brought to it."""

    @contextmanager
    def use(self, stream: str, *, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> Iterator[None]:
        """Work inside the block runs on ``stream``, after all that it depends on and before all that depends on it."""
        for buffer in reads:
            self.wait(stream, buffer.written)
        for buffer in writes:
            # Whoever has read it since waited for the write itself.
            for event in buffer.read.values() or [buffer.written]:
                self.wait(stream, event)
        try:
            yield
        finally:
            done = self.record(stream)
            for buffer in reads:
                buffer.read[stream] = done
            for buffer in writes:
                buffer.written, buffer.read = done, {}

    def release(self, buffer: Buffer) -> None:
        """Before the last reference to memory of the compute stream's allocator is dropped: let the readers finish.

        The allocator gives it to later work of the compute stream, and knows nothing of the others.
        """
        for event in buffer.read.values():
            self.wait(COMPUTE, event)

    def let_go(self, buffer: Buffer) -> None:
        """Before the last reference to host memory is dropped: return when nothing is copied with it any more."""

    def copy(self, stream: str, target: Tensor, source: Tensor) -> None:
        """Put a copy on ``stream``; inside ``use``."""
        target.copy_(source)

    def wait(self, stream: str, event: Event | None) -> None:
        """Hold ``stream`` until ``event``."""

    def record(self, stream: str) -> Event | None:
        """The event of all that is on ``stream`` by now."""

    def synchronize(self) -> None:
        """Return when all three are idle: from then on, the host may look."""

    def waited(self) -> dict[str, float]:
        """Seconds for which the compute stream stood still for each of the others, since this was asked last."""
        return {UP: 0.0, DOWN: 0.0}

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that can be copied while the device computes."""
        return torch.zeros(*shape, dtype=dtype)

    def unpin(self) -> None:
        """Make ordinary memory of all that ``host_zeros`` gave; while nothing is copied."""


class CudaStreams(Streams):
    """A GPU's. ``pinnable``: bytes of host memory that may be pinned (None: all); the rest is staged."""

    staged = True

    def __init__(self, device: torch.device, pinnable: int | None = None):
        self.device = device
        self._side = {UP: torch.cuda.Stream(device), DOWN: torch.cuda.Stream(device)}
        register = partial(cuda_register, device)
        self._memory = PinnedMemory(pinnable, register=register)
        self._slots = PinnedMemory(register=register)
        self._staging = {name: self._stage(name) for name in self._side}
        self._written: list[Landed] = []
        """Copies by the host that the next one must wait for, since they write what it reads."""
        self._waits: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MEASURED)
        """For which stream the compute stream waited, from when until when."""

    def _stream(self, name: str) -> torch.cuda.Stream:
        return self._side.get(name) or torch.cuda.current_stream(self.device)

    def _stage(self, name: str) -> Staging:
        def make(size: int) -> Tensor:
            slot = self._slots.zeros([size], torch.uint8)
            self._slots.ready()
            return slot

        return Staging(partial(self._put, name), partial(self._mark, name), make)

    def _put(self, name: str, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream(name)):
            target.copy_(source, non_blocking=True)

    def _mark(self, name: str, *, timed: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self._stream(name))
        return event

    def copy(self, stream: str, target: Tensor, source: Tensor) -> None:
        self._memory.ready()
        host = source if stream == UP else target
        if self._memory.holds(host):
            self._put(stream, target, source)
            return
        if stream == DOWN:
            self._staging[DOWN].down(target, source)
            return
        for event in self._written:
            event.synchronize()
        self._written.clear()
        self._staging[UP].up(target, source)

    def wait(self, stream: str, event: Event | None) -> None:
        if event is None or event.stream == stream:
            return
        measured = stream == COMPUTE and not event.event.query()
        before = self._mark(COMPUTE, timed=True) if measured else None
        self._stream(stream).wait_event(event.event)
        if before is not None:
            self._waits.append((event.stream, before, self._mark(COMPUTE, timed=True)))
        if stream == UP and event.copies:
            self._written.append(event)

    def waited(self) -> dict[str, float]:
        found = super().waited()
        while self._waits and self._waits[0][-1].query():
            name, before, after = self._waits.popleft()
            found[name] += before.elapsed_time(after) / 1e3
        return found

    def record(self, stream: str) -> Event:
        return Landed(self._mark(stream), self._staging[DOWN].landing if stream == DOWN else (), stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
        self._staging[DOWN].synchronize()

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._memory.zeros(shape, dtype)

    def let_go(self, buffer: Buffer) -> None:
        for event in (buffer.written, *buffer.read.values()):
            if event is not None:
                event.synchronize()
        for tensor in buffer.tensors.values():
            self._memory.free(tensor)

    def unpin(self) -> None:
        self.synchronize()
        self._memory.release()


class BlockingStreams(CudaStreams):
    """A GPU's, with every copy waited for and nothing pinned, as a plain ``.to()`` does it.

    What the overlap is measured against.
    """

    def copy(self, stream: str, target: Tensor, source: Tensor) -> None:
        torch.cuda.synchronize(self.device)
        target.copy_(source)
        torch.cuda.synchronize(self.device)

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)


def streams_for(device: torch.device, pinnable: int | None = None) -> Streams:
    """The streams of a device; see ``CudaStreams``."""
    return CudaStreams(device, pinnable) if device.type == "cuda" else Streams()

"""What keeps the arithmetic fed: weights, states and block inputs on their way ahead of need.

The walk says once, at its start, in which order it will visit the stages (``begin``). From then on
each ``visit`` finds its weights on the device, or on their way, and sends for those of the next
stage; each chunk of states that is used makes room for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .pools import Layout, Pool, layout
from .streams import COMPUTE, DOWN, UP, Buffer, Streams

if TYPE_CHECKING:
    from .arena import Arena, Group

AHEAD = 1
"""Swapped stages whose weights are sent for before they are needed."""
RING_BYTES = 2 << 30
"""Device memory for states on their way: about those of one double block of FLUX.1."""

Place = tuple["Group", int, int]
"""A chunk of states: group, first element, element after the last."""


class Conveyor:
    """The streams, the memory they use, and what is on it. One for a model; used by one thread."""

    def __init__(self, device: torch.device, streams: Streams):
        self.streams = streams
        self.host = Pool(streams)
        self.device = Pool(streams, device)
        self._device = device
        self.arenas: list[Arena] = []
        """Every stage's, in the order in which they were made."""
        self._gradient_sizes: dict[str, int] = {}
        self._gradients: dict[str, Tensor] = {}
        self._route: deque[Arena] = deque()
        self._wanted: deque[Place] = deque()
        self._coming: deque[tuple[Place, Layout, Buffer]] = deque()
        self._ring_used = 0

    def begin(self, route: Sequence[Arena], updates: Sequence[Arena] = ()) -> None:
        """Announce which stages will be visited, and which of them will be updated, in order."""
        self._route = deque(route)
        self._clear_ring()
        if self.streams.staged:
            self._wanted.extend((group, *chunk) for a in updates for group in a.groups for chunk in group.chunks())

    @contextmanager
    def visit(self, arena: Arena) -> Iterator[None]:
        """Inside the block the stage's weights may be computed with; they stay where they are after it."""
        assert self._route[0] is arena, "the walk leaves the route that it announced"
        self._route.popleft()
        arena.bring()
        self._send_for_next(arena)
        self._fill_ring()
        with self.streams.use(COMPUTE, reads=arena.buffers()):
            yield

    @contextmanager
    def states(
        self, group: Group, start: int, stop: int, target: Buffer
    ) -> Iterator[tuple[dict[str, Tensor], list[Buffer]]]:
        """A chunk of states to be updated in place, and the buffers it lies in; then it goes into ``target``."""
        new = group.home_slice(target, start, stop)
        if not self.streams.staged:
            for name, old in group.home_slice(group.home, start, stop).items():
                new[name].copy_(old)
            yield new, []
            return
        self._fill_ring()
        place, shape, buffer = self._coming.popleft()
        assert place == (group, start, stop), "the updates leave the order that was announced"
        try:
            yield buffer.tensors, [buffer]
            with self.streams.use(DOWN, reads=[buffer], writes=[target]):
                for name, tensor in buffer.tensors.items():
                    self.streams.copy(DOWN, new[name], tensor)
        finally:
            self._ring_used -= _nbytes(buffer)
            self.device.give(shape, buffer)
        self._fill_ring()

    def reserve_gradient(self, label: str, numel: int) -> None:
        """Ask for room for the gradients of a stage's group of that label; before the first is taken."""
        self._gradient_sizes[label] = max(numel, self._gradient_sizes.get(label, 0))

    def gradient(self, label: str, numel: int) -> Tensor:
        """The flat float32 gradient that all stages share in turn; what another has left in it is still there."""
        if label not in self._gradients:
            self._gradients[label] = torch.empty(self._gradient_sizes[label], device=self._device)
        return self._gradients[label][:numel]

    def park(self) -> None:
        """Bring all home and let go of the device's memory."""
        self._clear_ring()
        self._route.clear()
        for arena in self.arenas:
            # A swapped stage has written home whatever has changed; a resident one only does so here.
            arena.leave(write_home=arena.resident)
        self.streams.synchronize()
        self.device.free()
        self._gradients.clear()

    def _send_for_next(self, current: Arena) -> None:
        """Bring the next swapped stages of the route."""
        ahead: list[Arena] = []
        for arena in self._route:
            if len(ahead) < AHEAD and not arena.resident and arena is not current and arena not in ahead:
                ahead.append(arena)
        for arena in ahead:
            if not arena.is_here:
                self._make_room(arena, keep=[current, *ahead])
                arena.bring()

    def _make_room(self, wanted: Arena, keep: Sequence[Arena]) -> None:
        """Where as many swapped stages of that layout are here as may be, let go of the one that is needed last."""
        here = [a for a in self.arenas if not a.resident and a.is_here and a.layout == wanted.layout]
        if len(here) <= AHEAD:
            return
        next_visit = {id(a): place for place, a in reversed(list(enumerate(self._route)))}
        idle = [a for a in here if not any(a is k for k in keep)]
        max(idle, key=lambda a: next_visit.get(id(a), len(self._route))).leave()

    def _fill_ring(self) -> None:
        """Send for the next chunks of states, as many as there is room for."""
        while self._wanted:
            group, start, stop = self._wanted[0]
            old = group.home_slice(group.home, start, stop)
            needed = sum(t.numel() * t.element_size() for t in old.values())
            if self._coming and self._ring_used + needed > RING_BYTES:
                return
            shape = layout({name: (t.dtype, tuple(t.shape)) for name, t in old.items()})
            buffer = self.device.take(shape)
            with self.streams.use(UP, reads=[group.home], writes=[buffer]):
                for name, tensor in old.items():
                    self.streams.copy(UP, buffer[name], tensor)
            self._ring_used += needed
            self._coming.append((self._wanted.popleft(), shape, buffer))

    def _clear_ring(self) -> None:
        for _, shape, buffer in self._coming:
            self.device.give(shape, buffer)
        self._coming.clear()
        self._wanted.clear()
        self._ring_used = 0


def _nbytes(buffer: Buffer) -> int:
    return sum(t.numel() * t.element_size() for t in buffer.tensors.values())


class Keeper:
    """A stack of the stages' inputs between the way out and the way back, on the device or (``offload``) the host."""

    def __init__(self, conveyor: Conveyor, *, offload: bool):
        self.streams, self.host, self.device = conveyor.streams, conveyor.host, conveyor.device
        self.offload = offload and conveyor.streams.staged
        self._largest = 0
        self._stack: list[_Kept] = []
        self._leaving: deque[Buffer] = deque()

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Keep ``tensors``, which the compute stream has made, or will have made by the time they are needed.

        Of the offloaded, only streams of tokens [B, L, C] travel; ``vec`` [B, C], which all stages share, is small.
        """
        moving = [t for t in tensors if self.offload and t.ndim > 2]
        kept = _Kept(moving, tuple(t for t in tensors if not self.offload or t.ndim <= 2))
        self._stack.append(kept)
        if not moving:
            return
        here = Buffer({str(i): t for i, t in enumerate(moving)})
        with self.streams.use(COMPUTE, writes=[here]):
            pass  # they are being made: the copy waits for that
        kept.shape = self._room(sum(t.nbytes for t in moving))
        kept.home = self.host.take(kept.shape)
        with self.streams.use(DOWN, reads=[here], writes=[kept.home]):
            for place, tensor in zip(kept.places(kept.home), moving, strict=True):
                self.streams.copy(DOWN, place, tensor)
        self._leaving.append(here)
        while len(self._leaving) > 2:
            self.streams.release(self._leaving.popleft())

    @contextmanager
    def taken(self) -> Iterator[tuple[Tensor, ...]]:
        """The tensors that were put last, to be computed with inside the block; the ones before are sent for."""
        self._release()
        kept = self._stack[-1]
        self._send_for(kept)
        if len(self._stack) > 1:
            self._send_for(self._stack[-2])
        self._stack.pop()
        try:
            if kept.here is None:
                yield kept.stayed
            else:
                with self.streams.use(COMPUTE, reads=[kept.here]):
                    yield (*kept.places(kept.here), *kept.stayed)
        finally:
            self._give_back(kept)

    def clear(self) -> None:
        """Forget what is kept: after a walk that was cut short."""
        self._release()
        while self._stack:
            self._give_back(self._stack.pop())

    def _room(self, nbytes: int) -> Layout:
        """One layout for all that is kept, as large as the largest: pictures of other sizes use the same memory."""
        if nbytes > self._largest:
            for pool in (self.host, self.device):
                pool.forget(_bytes_layout(self._largest))
            self._largest = nbytes
        return _bytes_layout(self._largest)

    def _release(self) -> None:
        while self._leaving:
            self.streams.release(self._leaving.popleft())

    def _give_back(self, kept: _Kept) -> None:
        for pool, buffer in ((self.host, kept.home), (self.device, kept.here)):
            if buffer is None:
                continue
            if kept.shape == _bytes_layout(self._largest):
                pool.give(kept.shape, buffer)
            else:
                pool.drop(buffer)

    def _send_for(self, kept: _Kept) -> None:
        if kept.here is not None or kept.home is None:
            return
        kept.here = self.device.take(kept.shape)
        with self.streams.use(UP, reads=[kept.home], writes=[kept.here]):
            for target, source in zip(kept.places(kept.here), kept.places(kept.home), strict=True):
                self.streams.copy(UP, target, source)


def _bytes_layout(nbytes: int) -> Layout:
    return layout({"bytes": (torch.uint8, (nbytes,))})


class _Kept:
    """A stage's inputs for one micro-batch: token streams at ``home`` or on their way ``here``; the rest stayed."""

    def __init__(self, moving: Sequence[Tensor], stayed: tuple[Tensor, ...]):
        self.moving = [(t.dtype, tuple(t.shape), t.nbytes) for t in moving]
        self.stayed = stayed
        self.shape: Layout = ()
        self.home: Buffer | None = None
        self.here: Buffer | None = None

    def places(self, buffer: Buffer) -> list[Tensor]:
        """Where the token streams lie in one of the buffers."""
        parts = buffer["bytes"][: sum(nbytes for *_, nbytes in self.moving)].split(
            [nbytes for *_, nbytes in self.moving]
        )
        return [part.view(dtype).view(shape) for part, (dtype, shape, _) in zip(parts, self.moving, strict=True)]

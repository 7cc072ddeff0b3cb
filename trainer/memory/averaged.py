"""The running average of the weights in their place, for a forward pass.

Nothing is kept of it but its difference from the weights, in host memory. So a stage's average is made anew whenever
the stage is visited, into a spare slot of the device, from the weights there and from what is sent for: the difference,
and under ``split`` the residuals. That is 4 bytes for every parameter (2 without ``split``) on each pass: 48 GB for
FLUX.1, a second or two. The weights themselves stay as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from ..optim.average import AVERAGE
from ..optim.base import averaged, slice_storage
from .pools import Layout, layout
from .streams import COMPUTE, UP, Buffer

if TYPE_CHECKING:
    from .arena import Arena, Group
    from .conveyor import Conveyor

WINDOW = 4
"""Chunks on their way at once."""


@contextmanager
def visit_average(conveyor: Conveyor, arena: Arena) -> Iterator[None]:
    """``conveyor.visit``, but inside the block the stage computes with the average of its weights."""
    slots: list[tuple[Group, Buffer]] = []
    with conveyor.visit(arena):
        try:
            for group in arena.groups:
                slots.append((group, conveyor.device.take(group.weight_layout)))
                _fill(conveyor, *slots[-1])
            for group, slot in slots:
                group.point_at(slot["weight"])
            with conveyor.streams.use(COMPUTE, reads=[slot for _, slot in slots]):
                yield
        finally:
            for group, slot in slots:
                group.point_at(group.current)
                conveyor.device.give(group.weight_layout, slot)


def _fill(conveyor: Conveyor, group: Group, slot: Buffer) -> None:
    """Have the average of a group, whose weights are on the device, be in ``slot``."""
    assert group.here is not None
    streams, coming = conveyor.streams, deque[tuple[Layout, Buffer]]()
    try:
        for start, stop in group.chunks():
            home = storage_of(group, start, stop)
            buffers = []
            if streams.staged:
                shape = layout({name: (t.dtype, tuple(t.shape)) for name, t in home.items()})
                coming.append((shape, buffer := conveyor.device.take(shape)))
                with streams.use(UP, reads=[group.home], writes=[buffer]):
                    for name, tensor in home.items():
                        streams.copy(UP, buffer[name], tensor)
                home, buffers = buffer.tensors, [buffer]
            with streams.use(COMPUTE, reads=[group.here, *buffers], writes=[slot]):
                slot["weight"][start:stop].copy_(averaged(group.here["weight"][start:stop], home))
            if len(coming) == WINDOW:
                conveyor.device.give(*coming.popleft())
    finally:
        for shape, buffer in coming:
            conveyor.device.give(shape, buffer)


def storage_of(group: Group, start: int, stop: int) -> dict[str, Tensor]:
    """What makes an average of elements ``start`` to ``stop`` of a group's weights, of all that is kept beside them."""
    kept = {name: t for name, t in group.storage.items() if name.partition(".")[0] in (AVERAGE, "residual")}
    return slice_storage(kept, start, stop, group.numel)

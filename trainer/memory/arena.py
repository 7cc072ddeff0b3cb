"""Flat memory for the parameters of one stage of the walk: weights, master residuals, states.

A stage (a transformer block, or the layers before or after them) keeps the parameters of one dtype
in one flat tensor, each parameter starting on a multiple of 256 elements. So a block travels
between host and device in a few large copies and is updated by a few large operations, and the
modules see ordinary parameters, which are views.

An update writes everything anew, into spare memory of the same layout that then takes the old one's
place: a fault in the middle leaves the whole stage as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..optim.base import SMALL, UpdateSpec, finite, slice_storage, storage_layout, update_chunk_
from .pools import Layout, layout
from .streams import COMPUTE, DOWN, UP, Buffer

if TYPE_CHECKING:
    from .conveyor import Conveyor

ALIGN = 256
"""Elements: every parameter starts on a multiple of this, the block size of the packed state formats."""
CHUNK = 1 << 22
"""Elements whose states travel and are updated at once."""


def aligned(numel: int) -> int:
    """The next multiple of ``ALIGN``."""
    return -(-numel // ALIGN) * ALIGN


def first_rows(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, int]:
    """Each parameter's first row of 256, all laid one after the other, as ``torch.optim`` classes number them."""
    rows, row = {}, 0
    for name, parameter in named:
        rows[name] = row
        row += aligned(parameter.numel()) // ALIGN
    return rows


@dataclass(frozen=True)
class Piece:
    """One parameter's place in its group."""

    name: str
    parameter: nn.Parameter
    start: int
    row: int
    """Number of its first row of 256 among all that is trained: what the counted rounding knows it by."""

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's elements of ``flat``, in its shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


class Group:
    """Parameters of one dtype in one stage.

    ``home`` is the host's buffer: ``weight`` and the optimizer's storage. ``here`` is the device's
    copy of the weights while there is one; where the device is the host and the stage is resident,
    it is ``home`` itself.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], spec: UpdateSpec, conveyor: Conveyor, resident: bool,
        rows: Mapping[str, int],
    ):  # fmt: skip
        self.spec, self.conveyor, self.resident = spec, conveyor, resident
        self.dtype = named[0][1].dtype
        self.pieces: list[Piece] = []
        start = 0
        for name, parameter in named:
            self.pieces.append(Piece(name, parameter, start, rows[name]))
            start += aligned(parameter.numel())
        self.numel = start
        size = "small" if all(p.parameter.numel() <= SMALL for p in self.pieces) else "large"
        self.label = f"{str(self.dtype).removeprefix('torch.')}.{size}"
        """Name of this group among its stage's."""
        self.weight_layout: Layout = layout({"weight": (self.dtype, (self.numel,))})
        self.home_layout = self.weight_layout + layout(storage_layout(spec, self.numel, self.dtype))
        self.home = conveyor.host.make(self.home_layout)
        self.here: Buffer | None = None
        self.finite: Tensor | None = None
        """0-d bool on the device: whether the last step's gradients were all finite (else it changed nothing)."""
        self.point_at(self.home["weight"])
        conveyor.reserve_gradient(self.label, self.numel)

    @property
    def current(self) -> Tensor:
        """The weights as they are now, flat: on the device while they are there, else at home."""
        return (self.here or self.home)["weight"]

    @property
    def storage(self) -> dict[str, Tensor]:
        """The optimizer's storage, flat, in host memory."""
        return {name: t for name, t in self.home.tensors.items() if name != "weight"}

    @property
    def shares_home(self) -> bool:
        """Whether the weights are used where they lie: a resident stage on the CPU."""
        return self.resident and not self.conveyor.streams.staged

    def bring(self) -> None:
        """Send the weights to the device, unless they are there."""
        if self.here is not None:
            return
        if self.shares_home:
            self.here = self.home
        else:
            streams, self.here = self.conveyor.streams, self.conveyor.device.take(self.weight_layout)
            with streams.use(UP, reads=[self.home], writes=[self.here]):
                streams.copy(UP, self.here["weight"], self.home["weight"])
        self.point_at(self.here["weight"])

    def leave(self, *, write_home: bool) -> None:
        """Let go of the device's copy; ``write_home``: the host's is not the same."""
        if self.here is not None and self.here is not self.home:
            if write_home:
                self._send_weights(self.here, self.home)
            self.conveyor.device.give(self.weight_layout, self.here)
        self.here = None
        self.point_at(self.home["weight"])

    def _send_weights(self, source: Buffer, target: Buffer) -> None:
        streams = self.conveyor.streams
        with streams.use(DOWN, reads=[source], writes=[target]):
            streams.copy(DOWN, target["weight"], source["weight"])

    def take_gradients(self, gradients: Sequence[Tensor], *, add: bool) -> None:
        """Copy the parameters' gradients into the flat gradient (``add``: on top of what is there)."""
        flat = self.conveyor.gradient(self.label, self.numel)
        views = [piece.view(flat) for piece in self.pieces]
        if add:
            for view, gradient in zip(views, gradients, strict=True):
                view.add_(gradient)  # one by one: float32 copies of all would be as large as the gradient itself
            return
        torch._foreach_copy_(views, list(gradients))
        ends = [(p.start + p.parameter.numel()) for p in self.pieces]
        gaps = [flat[end : aligned(end)] for end in ends if end % ALIGN]
        if gaps:
            torch._foreach_zero_(gaps)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each part whose states travel at once."""
        for start in range(0, self.numel, CHUNK):
            yield start, min(start + CHUNK, self.numel)

    def rows(self, start: int, stop: int) -> list[range]:
        """The numbers of the rows of 256 that hold elements ``start`` to ``stop``, both multiples of it."""
        found = []
        for piece in self.pieces:
            first = max(start, piece.start)
            last = min(stop, piece.start + aligned(piece.parameter.numel()))
            if first < last:
                away = piece.row - piece.start // ALIGN
                found.append(range(first // ALIGN + away, last // ALIGN + away))
        return found

    def step(self, *, lr: float, step: int) -> tuple[Buffer, Buffer]:
        """One optimizer step from the flat gradient into spare buffers, which are returned: home's and here's.

        Nothing of the group itself has changed when it returns, or raises; ``commit`` puts the new
        buffers in the old ones' place. Where a gradient is not finite, the new values are the old ones.
        """
        assert self.here is not None
        host, device, streams = self.conveyor.host, self.conveyor.device, self.conveyor.streams
        home = here = host.take(self.home_layout)
        gradient = self.conveyor.gradient(self.label, self.numel)
        self.finite = finite(gradient)
        try:
            if self.here is not self.home:
                here = device.take(self.weight_layout)
            for start, stop in self.chunks():
                weight = here["weight"][start:stop]
                with (
                    self.conveyor.states(self, start, stop, home) as (states, buffers),
                    streams.use(COMPUTE, reads=[self.here], writes=[here, *buffers]),
                ):
                    weight.copy_(self.here["weight"][start:stop])
                    update_chunk_(self.spec, weight, gradient[start:stop], states,
                                  lr=lr, step=step, rows=self.rows(start, stop), ok=self.finite)  # fmt: skip
            if not self.resident:
                self._send_weights(here, home)
        except BaseException:
            self._give_back(home, here)
            raise
        return home, here

    def commit(self, home: Buffer, here: Buffer) -> None:
        """Put the buffers that ``step`` returned in the place of the old ones, which become spare."""
        assert self.here is not None
        old_home, old_here = self.home, self.here
        self.home, self.here = home, here
        self.point_at(here["weight"])
        self._give_back(old_home, old_here)

    def _give_back(self, home: Buffer, here: Buffer) -> None:
        self.conveyor.host.give(self.home_layout, home)
        if here is not home:
            self.conveyor.device.give(self.weight_layout, here)

    def home_slice(self, buffer: Buffer, start: int, stop: int) -> dict[str, Tensor]:
        """Views of the storage of elements ``start`` to ``stop`` in one of this group's home buffers."""
        storage = {name: t for name, t in buffer.tensors.items() if name != "weight"}
        return slice_storage(storage, start, stop, self.numel)

    def point_at(self, flat: Tensor) -> None:
        """Have the modules compute with ``flat``."""
        for piece in self.pieces:
            piece.parameter.data = piece.view(flat)


class Arena:
    """All parameters of one stage, in one group for each dtype; small tensors, whose states stay float32, apart."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], spec: UpdateSpec, conveyor: Conveyor, *, resident: bool,
        rows: Mapping[str, int],
    ):  # fmt: skip
        small_spec = replace(spec, state_format=dict.fromkeys(spec.states, "f32"))
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            kinds.setdefault((parameter.dtype, parameter.numel() <= SMALL), []).append((name, parameter))
        self.groups = [
            Group(group, small_spec if small else spec, conveyor, resident, rows) for (_, small), group in kinds.items()
        ]
        assert len({group.label for group in self.groups}) == len(self.groups)
        self.parameters = [piece.parameter for group in self.groups for piece in group.pieces]
        self.resident = resident
        self.layout = tuple(group.weight_layout for group in self.groups)
        """Stages of equal layout can use each other's device memory."""
        conveyor.arenas.append(self)

    @property
    def is_here(self) -> bool:
        """Whether the weights are on the device, or on their way."""
        return all(group.here is not None for group in self.groups)

    def bring(self) -> None:
        """Send the weights to the device, unless they are there."""
        for group in self.groups:
            group.bring()

    def leave(self, *, write_home: bool = False) -> None:
        """Let go of the device's copy of the weights."""
        for group in self.groups:
            group.leave(write_home=write_home)

    def buffers(self) -> list[Buffer]:
        """The device's buffers of weights."""
        return [group.here for group in self.groups if group.here is not None]

    def take_gradients(self, gradients: Sequence[Tensor], *, add: bool) -> None:
        """Gradients in the order of ``parameters``."""
        start = 0
        for group in self.groups:
            group.take_gradients(gradients[start : start + len(group.pieces)], add=add)
            start += len(group.pieces)

    def settle(self, *, resident: bool) -> None:
        """Have the weights stay on the device between uses, or not; while they are at home (``leave``)."""
        assert all(group.here is None for group in self.groups)
        self.resident = resident
        for group in self.groups:
            group.resident = resident

    def update(self, *, lr: float, step: int, keep: bool = True) -> None:
        """One optimizer step of every parameter from the gradients taken: all of them, or none if it raises.

        ``keep=False``: none in any case, but all the work of it.
        """
        done: list[tuple[Group, Buffer, Buffer]] = []
        try:
            for group in self.groups:
                done.append((group, *group.step(lr=lr, step=step)))
        except BaseException:
            for group, home, here in done:
                group._give_back(home, here)
            raise
        for group, home, here in done:
            if keep:
                group.commit(home, here)
            else:
                group._give_back(home, here)

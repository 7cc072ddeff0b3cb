"""Flat memory for the parameters of one stage of the walk: weights, master residuals, states, gradients.

A stage (a transformer block, or the layers before or after them) keeps the parameters of one dtype
in one flat tensor, each parameter starting on a multiple of 256 elements. So a block travels
between host and device in a few large copies and is updated by a few large operations, and the
modules see ordinary parameters, which are views.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..optim.base import UpdateSpec, make_storage, slice_storage, update_chunk_

ALIGN = 256
"""Elements: every parameter starts on a multiple of this, the block size of the packed state formats."""
CHUNK = 1 << 22
"""Elements that are updated at once: bounds the extra memory of an update."""


@dataclass(frozen=True)
class Piece:
    """One parameter's place in its group."""

    name: str
    parameter: nn.Parameter
    start: int

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's elements of ``flat``, in its shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


class Slots:
    """Device memory that the stages share, sized to the largest: gradients, and the weights of swapped stages."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sizes: dict[tuple[str, torch.dtype], int] = {}
        self.tensors: dict[tuple[str, torch.dtype], Tensor] = {}

    def reserve(self, kind: str, dtype: torch.dtype, numel: int) -> None:
        """Ask for room for ``numel`` elements; before the first ``take``."""
        self.sizes[kind, dtype] = max(numel, self.sizes.get((kind, dtype), 0))

    def take(self, kind: str, dtype: torch.dtype, numel: int) -> Tensor:
        """The first ``numel`` elements of that slot; what another stage left in it is still there."""
        key = (kind, dtype)
        if key not in self.tensors:
            element = torch.float32 if kind == "gradient" else dtype
            self.tensors[key] = torch.empty(self.sizes[key], dtype=element, device=self.device)
        return self.tensors[key][:numel]

    def free(self) -> None:
        """Give the memory back; the next ``take`` allocates it again."""
        self.tensors.clear()


class Group:
    """The parameters of one dtype in one stage. ``home`` is their place in host memory."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], spec: UpdateSpec, slots: Slots, *, resident: bool):
        self.spec, self.slots, self.resident = spec, slots, resident
        self.dtype = named[0][1].dtype
        self.pieces: list[Piece] = []
        start = 0
        for name, parameter in named:
            self.pieces.append(Piece(name, parameter, start))
            start += -(-parameter.numel() // ALIGN) * ALIGN
        self.numel = start
        self.key = zlib.crc32(named[0][0].encode())
        self.home = torch.zeros(self.numel, dtype=self.dtype)
        self.storage = make_storage(spec, self.numel, self.dtype, torch.device("cpu"))
        self.weight: Tensor | None = None
        self._point_at(self.home)
        slots.reserve("gradient", self.dtype, self.numel)
        if not resident:
            slots.reserve("weight", self.dtype, self.numel)

    @property
    def current(self) -> Tensor:
        """The weights as they are now, flat: on the device while they are there, else at home."""
        return self.home if self.weight is None else self.weight

    def bring(self) -> None:
        """Put the weights where the arithmetic is and point the module's parameters at them."""
        if self.weight is not None:
            return
        device = self.slots.device
        if not self.resident:
            self.weight = self.slots.take("weight", self.dtype, self.numel)
            self.weight.copy_(self.home)
        else:
            self.weight = self.home.to(device)
        self._point_at(self.weight)

    def send_home(self, *, changed: bool) -> None:
        """Let go of the device's copy, after writing it home if it has ``changed``."""
        if self.weight is None:
            return
        if changed and self.weight is not self.home:
            self.home.copy_(self.weight)
        self.weight = None
        self._point_at(self.home)

    def _point_at(self, flat: Tensor) -> None:
        for piece in self.pieces:
            piece.parameter.data = piece.view(flat)

    def take_gradients(self, gradients: Sequence[Tensor], *, add: bool) -> None:
        """Copy the parameters' gradients into the flat gradient (``add``: on top of what is there)."""
        flat = self.slots.take("gradient", self.dtype, self.numel)
        views = [piece.view(flat) for piece in self.pieces]
        if add:
            torch._foreach_add_(views, [g.float() for g in gradients])
            return
        torch._foreach_copy_(views, list(gradients))
        gaps = [
            flat[p.start + p.parameter.numel() : -(-(p.start + p.parameter.numel()) // ALIGN) * ALIGN]
            for p in self.pieces
            if p.parameter.numel() % ALIGN
        ]
        if gaps:
            torch._foreach_zero_(gaps)

    def update(self, *, lr: float, step: int) -> None:
        """One optimizer step from the flat gradient, chunk by chunk: states come, are used and go home."""
        weight, device = self.current, self.slots.device
        gradient = self.slots.take("gradient", self.dtype, self.numel)
        for start in range(0, self.numel, CHUNK):
            stop = min(start + CHUNK, self.numel)
            at_home = slice_storage(self.storage, start, stop, self.numel)
            here = {name: t.to(device) for name, t in at_home.items()}
            update_chunk_(
                self.spec, weight[start:stop], gradient[start:stop], here, lr=lr, step=step, offset=start, key=self.key
            )
            for name, t in here.items():
                if t is not at_home[name]:
                    at_home[name].copy_(t)


class Arena:
    """All parameters of one stage, in one group for each dtype."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], spec: UpdateSpec, slots: Slots, *, resident: bool):
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
        self.groups = [Group(group, spec, slots, resident=resident) for group in by_dtype.values()]
        self.parameters = [piece.parameter for group in self.groups for piece in group.pieces]
        self.resident = resident

    @contextmanager
    def weights(self, *, changing: bool = False) -> Iterator[None]:
        """The stage's weights are on the device inside this block. ``changing``: they are written home after it."""
        for group in self.groups:
            group.bring()
        try:
            yield
        finally:
            if not self.resident:
                for group in self.groups:
                    group.send_home(changed=changing)

    def take_gradients(self, gradients: Sequence[Tensor], *, add: bool) -> None:
        """Gradients in the order of ``parameters``."""
        start = 0
        for group in self.groups:
            group.take_gradients(gradients[start : start + len(group.pieces)], add=add)
            start += len(group.pieces)

    def update(self, *, lr: float, step: int) -> None:
        """One optimizer step of every parameter from the gradients taken."""
        for group in self.groups:
            group.update(lr=lr, step=step)

    def park(self) -> None:
        """Bring resident weights home and let go of the device's copy."""
        for group in self.groups:
            group.send_home(changed=True)

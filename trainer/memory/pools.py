"""Buffers that are made once and handed round: by layout, on the host or on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from .streams import Buffer, Streams

Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, dtype and shape of each tensor of a buffer."""


def layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
    """The layout of named tensors of these dtypes and shapes."""
    return tuple((name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items())


class Pool:
    """Buffers of one place. A buffer keeps what it held, and the events of those who still use it."""

    def __init__(self, streams: Streams, device: torch.device):
        self.streams, self.device = streams, device
        self._spare: dict[Layout, list[Buffer]] = defaultdict(list)

    def take(self, shape: Layout) -> Buffer:
        """A buffer of that layout: one that was given back, or a new one."""
        if self._spare[shape]:
            return self._spare[shape].pop()
        return self.make(shape)

    def make(self, shape: Layout) -> Buffer:
        """A new buffer of zeros."""
        if self.device.type == "cpu":
            return Buffer({name: self.streams.host_zeros(size, dtype) for name, dtype, size in shape})
        tensors = {name: torch.zeros(size, dtype=dtype, device=self.device) for name, dtype, size in shape}
        return Buffer(tensors)

    def give(self, shape: Layout, buffer: Buffer) -> None:
        """Give a buffer back. Work that still uses it is waited for by whoever writes it next."""
        self._spare[shape].append(buffer)

    def free(self) -> None:
        """Let go of the spare ones."""
        self._spare.clear()

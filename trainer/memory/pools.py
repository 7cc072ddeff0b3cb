"""Buffers that are made once and handed round: by layout, on the host or on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from .streams import COMPUTE, Buffer, Streams

Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, dtype and shape of each tensor of a buffer."""


def layout(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
    """The layout of named tensors of these dtypes and shapes."""
    return tuple((name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items())


class Pool:
    """Buffers of one place: a device's memory, or (None) the host's.

    A buffer keeps what it held, and the events of those who still use it.
    """

    def __init__(self, streams: Streams, device: torch.device | None = None):
        self.streams, self.device = streams, device
        self._spare: dict[Layout, list[Buffer]] = defaultdict(list)

    def take(self, shape: Layout) -> Buffer:
        """A buffer of that layout: one that was given back, or a new one."""
        if self._spare[shape]:
            return self._spare[shape].pop()
        return self.make(shape)

    def make(self, shape: Layout) -> Buffer:
        """A new buffer: zeros on the host, anything on a device."""
        if self.device is None:
            return Buffer({name: self.streams.host_zeros(size, dtype) for name, dtype, size in shape})
        buffer = Buffer({name: torch.empty(size, dtype=dtype, device=self.device) for name, dtype, size in shape})
        with self.streams.use(COMPUTE, writes=[buffer]):
            pass  # the allocator may hand out memory that work of the compute stream still uses
        return buffer

    def give(self, shape: Layout, buffer: Buffer) -> None:
        """Give a buffer back. Work that still uses it is waited for by whoever writes it next."""
        self._spare[shape].append(buffer)

    def forget(self, shape: Layout) -> None:
        """Let go of the spare ones of a layout."""
        for buffer in self._spare.pop(shape, ()):
            self.drop(buffer)

    def drop(self, buffer: Buffer) -> None:
        """Let go of one that was taken."""
        if self.device is None:
            self.streams.let_go(buffer)
        else:
            self.streams.release(buffer)

    def free(self) -> None:
        """Let go of the spare ones."""
        self._spare.clear()

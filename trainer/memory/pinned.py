"""Host memory that the GPU can reach by itself, and what becomes of copies where not all of it can be.

torch rounds its own pinned allocations up to powers of two (163 GB for 95), so memory is taken as it is and registered
with the driver, whole pages at a time, by several threads: that also makes the system find the pages. What the system
refuses to pin stays ordinary memory, and its copies go through a ring of pinned slots (``Staging``).
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)
PAGE = 4096
THREADS = 8
TOLD_EVERY = 8 << 30
"""Bytes between two lines in the log."""
SLOT = 64 << 20
"""Bytes of one of the ring's slots."""
SLOTS = 4
"""Slots in each direction."""


def cuda_register(device: torch.device, address: int, size: int) -> bool:
    """Pin ``size`` bytes at ``address`` for ``device``; False if the system refuses."""
    with torch.cuda.device(device):  # a new thread is on the first GPU, and would open a context there
        return int(_runtime().cudaHostRegister(address, size, 0)) == 0


def cuda_unregister(address: int) -> None:
    """Undo ``cuda_register``."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()


class PinnedMemory:
    """Hands out zeroed host tensors and pins them in the background, up to ``limit`` bytes (None: no limit).

    ``ready`` returns when that is done. The memory is unpinned when this object goes.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        register: Callable[[int, int], bool],
        unregister: Callable[[int], None] = cuda_unregister,
        threads: int = THREADS,
    ):
        self.limit = limit
        self.pinned = self.refused = 0
        """Bytes that are pinned, and that are not."""
        self._register, self._unregister = register, unregister
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pin")
        self._lock = threading.Lock()
        self._asked = 0
        self._told = 0
        self._coming: list[Future[None]] = []
        self._held: dict[int, Tensor] = {}
        """What is pinned, by address: kept until it is unpinned."""
        # Not at the end of the process: the system takes it back then anyway, and faster.
        weakref.finalize(self, _release, self._held, unregister, self._pool).atexit = False

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros with pages of its own."""
        size = math.prod(shape) * dtype.itemsize
        whole = -(-size // PAGE) * PAGE
        raw = torch.from_numpy(np.zeros(whole + PAGE, np.uint8))  # calloc: no page is touched before it is needed
        start = -raw.data_ptr() % PAGE
        pages = raw[start : start + whole]
        with self._lock:
            within = size > 0 and (self.limit is None or self._asked + whole <= self.limit)
            self._asked += whole if within else 0
            self.refused += 0 if within else size
        if within:
            self._coming.append(self._pool.submit(self._pin, pages))
        return pages[:size].view(dtype).view(*shape)

    def ready(self) -> None:
        """Wait for what is being pinned, and say so where not all could be."""
        if not self._coming:
            return
        for one in self._coming:
            one.result()
        self._coming.clear()
        log.info("%.1f GiB of host memory are pinned", self.pinned / (1 << 30))
        if self.refused:
            log.warning(
                "%.1f GiB of host memory could not be pinned: they are copied once more on their way, which takes time",
                self.refused / (1 << 30),
            )

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that is pinned; after ``ready``."""
        return _first_page(tensor) in self._held

    def free(self, tensor: Tensor) -> None:
        """Unpin one, and keep it no longer: the system has its memory back when the caller forgets it too."""
        self.ready()
        with self._lock:
            pages = self._held.pop(_first_page(tensor), None)
            if pages is not None:
                self._unregister(pages.data_ptr())
                self.pinned -= pages.numel()
                self._asked -= pages.numel()

    def release(self) -> None:
        """Unpin everything; the tensors stay as they are."""
        self.ready()
        with self._lock:
            for address in list(self._held):
                self._unregister(address)
            self._held.clear()
            self.pinned = self._asked = 0

    def _pin(self, pages: Tensor) -> None:
        size = pages.numel()
        good = self._register(pages.data_ptr(), size)
        with self._lock:
            if not good:
                self.refused += size
                return
            self._held[pages.data_ptr()] = pages
            self.pinned += size
            if self.pinned - self._told >= TOLD_EVERY:
                self._told = self.pinned
                log.info("pinning host memory: %.0f GiB", self.pinned / (1 << 30))


def _first_page(tensor: Tensor) -> int:
    """Where the first whole page of a tensor's memory begins."""
    return -(-tensor.untyped_storage().data_ptr() // PAGE) * PAGE


def _release(held: dict[int, Tensor], unregister: Callable[[int], None], pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=True)
    for address in list(held):
        unregister(address)
    held.clear()


class Landed:
    """An event of the device, and copies by the host that have to follow it."""

    def __init__(self, event: Any, copies: Sequence[Future[None]] = (), stream: str = ""):
        self.event, self.copies, self.stream = event, tuple(copies), stream

    def synchronize(self) -> None:
        """Return when both are over."""
        self.event.synchronize()
        for copy in self.copies:
            copy.result()


class Staging:
    """Copies between the device and memory that is not pinned, through a bounded ring of slots that are.

    Up, the host fills a slot and the device takes it from there; down, a thread empties the slots in order as the
    device fills them. ``put(target, source)`` puts a copy on the device's stream, ``mark()`` gives the event of all
    that is on it; they are of one direction.
    """

    def __init__(
        self,
        put: Callable[[Tensor, Tensor], None],
        mark: Callable[[], Any],
        make: Callable[[int], Tensor],
        *,
        slot: int = SLOT,
        slots: int = SLOTS,
    ):
        self._put, self._mark = put, mark
        self._make, self._size, self._count = make, slot, slots
        self._free: deque[tuple[Tensor, Landed | None]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self.landing: deque[Future[None]] = deque()
        """Copies by the thread that are not known to be over, in order."""

    def up(self, target: Tensor, source: Tensor) -> None:
        """From the host's ``source``, which nobody writes any more, to the device."""
        for part, whole in self._parts(target, source):
            slot = self._take(part.numel())
            slot.copy_(whole)
            self._put(part, slot)
            self._give(slot, Landed(self._mark()))

    def down(self, target: Tensor, source: Tensor) -> None:
        """From the device to the host's ``target``: over when ``landing`` is."""
        for whole, part in self._parts(target, source):
            slot = self._take(part.numel())
            self._put(slot, part)
            event = self._mark()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="unstage")
            copy = self._thread.submit(_land, event, whole, slot)
            self.landing.append(copy)
            self._give(slot, Landed(event, [copy]))
        while self.landing and self.landing[0].done():
            self.landing.popleft().result()

    def synchronize(self) -> None:
        """Wait for the thread."""
        while self.landing:
            self.landing.popleft().result()

    def _parts(self, target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
        flat = [t.view(-1).view(torch.uint8) for t in (target, source)]
        return list(zip(*(t.split(self._size) for t in flat), strict=True))

    def _take(self, size: int) -> Tensor:
        if len(self._free) < self._count:
            return self._make(self._size)[:size]
        slot, last = self._free.popleft()
        if last is not None:
            last.synchronize()
        return slot[:size]

    def _give(self, slot: Tensor, last: Landed) -> None:
        whole = torch.as_strided(slot, (self._size,), (1,), slot.storage_offset())
        self._free.append((whole, last))


def _land(event: Any, target: Tensor, slot: Tensor) -> None:
    event.synchronize()
    target.copy_(slot)

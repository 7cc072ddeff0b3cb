"""Decoding on all cores, in order, with bounded memory."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function: Callable[[_In], _Out], items: Iterable[_In], ahead: int = 4) -> Generator[_Out, None, None]:
    """``map`` over one thread a core, results in order, at most ``ahead`` items a thread in flight.

    Close the generator (``contextlib.closing``) where the loop over it may be left early.
    """
    workers = min(32, cores())
    pool = concurrent.futures.ThreadPoolExecutor(workers, "flux-fft-decode")
    waiting: collections.deque[concurrent.futures.Future[_Out]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

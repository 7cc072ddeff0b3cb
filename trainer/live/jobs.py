"""Work for one thread, asked for by others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..protocol import WorkerClosing

T = TypeVar("T")


class Job:
    """Something to do, and its outcome."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.done = work, threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it; whoever waits gets the result or the error."""
        try:
            self.result = self.work()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


class Jobs:
    """A queue of jobs. ``call`` from any thread, ``next`` from the one that works."""

    def __init__(self) -> None:
        # SimpleQueue: its put may be called from a signal handler, amid a get of the same thread.
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.closed = False

    def call(self, work: Callable[[], T]) -> T:
        """Have ``work`` done and return what it returns, or raise what it raises. ``WorkerClosing`` after ``close``."""
        job = Job(work)
        with self._lock:
            if self.closed:
                raise WorkerClosing("the worker is exiting")
            self._queue.put(job)
        job.done.wait()
        if job.error is not None:
            raise job.error
        return job.result

    def wake(self) -> None:
        """Let a waiting ``next`` return None. Safe in a signal handler."""
        self._queue.put(None)

    def next(self, wait: float) -> Job | None:
        """The next job, or None if none comes within ``wait`` seconds or it was woken."""
        try:
            return self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Refuse what waits and what comes."""
        with self._lock:
            self.closed = True
        while not self._queue.empty():
            job = self._queue.get_nowait()
            if job is not None:
                job.error = WorkerClosing("the worker is exiting")
                job.done.set()

"""Being asked to end by the system: Ctrl-C, SIGTERM, a closed terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
"""Those that the system at hand has are caught (SIGHUP is POSIX's, SIGBREAK Windows')."""


@contextlib.contextmanager
def caught_signals(note: Callable[[str], None]) -> Iterator[None]:
    """While inside, such a signal calls ``note`` with its name, between two Python operations, and ends nothing.

    Python hears signals on its main thread only: elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _: Any) -> None:
        note(signal.Signals(number).name)

    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

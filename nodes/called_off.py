"""Which prompts of this ComfyUI train a run, so that Pause and Stop end them whatever they wait for.

The run's worker cannot tell them: there may be none yet, or it loads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

_waiting: dict[Path, threading.Event] = {}


@contextlib.contextmanager
def trained_here(run_dir: Path) -> Iterator[threading.Event]:
    """A prompt trains the run inside the block; the event is set when the user has called that off."""
    off = _waiting[run_dir] = threading.Event()
    try:
        yield off
    finally:
        del _waiting[run_dir]


def is_trained_here(run_dir: Path) -> bool:
    """Whether a prompt of this ComfyUI trains the run."""
    return run_dir in _waiting


def call_off(run_dir: Path) -> bool:
    """Have the prompt that trains the run here end; whether there is one."""
    off = _waiting.get(run_dir)
    if off is not None:
        off.set()
    return off is not None

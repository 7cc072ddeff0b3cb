"""Which prompts of this ComfyUI train a run, so that Pause and Stop end them whatever they wait for.

The run's worker cannot tell them: there may be none yet, or it loads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

_training: dict[Path, tuple[str, threading.Event]] = {}
"""Of each run that is trained here: the prompt that does, and what is set when the user has called that off."""


@contextlib.contextmanager
def trained_here(run_dir: Path, prompt_id: str) -> Iterator[threading.Event]:
    """A prompt trains the run inside the block; the event is set when the user has called that off."""
    off = threading.Event()
    _training[run_dir] = prompt_id, off
    try:
        yield off
    finally:
        del _training[run_dir]


def prompts() -> dict[str, str]:
    """By the run's name: the prompt that trains it here."""
    return {run_dir.name: prompt_id for run_dir, (prompt_id, _) in list(_training.items())}


def call_off(run_dir: Path) -> bool:
    """Have the prompt that trains the run here end; whether there is one."""
    _, off = _training.get(run_dir, ("", None))
    if off is not None:
        off.set()
    return off is not None

"""What a process that was killed has left half-written in a run directory, removed by whoever opens the run next."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

from .. import files
from . import savepoints, underway

log = logging.getLogger(__name__)
YOUNG = 60.0
"""Seconds for which a small file may be in the making by a client, who needs no lock for it."""


def prepare(root: Path) -> None:
    """Make ``root`` ready for a new run, whatever is left of an earlier one. ``ValueError`` if a worker still has that,
    or it cannot be.
    """
    try:
        if (root / "lock").exists():  # of a run that was deleted, but not wholly
            with open(root / "lock", "a+b") as file, files.exclusive(file, 2.0) as free:
                if not free:
                    raise ValueError(f"a run that was in {root} is still open in a worker: stop that, or choose"
                                     " another name")
        _sweep_deleted(root.parent)
        for folder in ("samples", "state", "checkpoints"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        # Of a creation that was cut short, or of a run that was deleted, but not wholly.
        for name in ("events.jsonl", "model.json"):
            files.unlink(root / name)
        savepoints.clear(root / "state")
    except OSError as error:
        raise ValueError(f"{root} cannot be made: {error.strerror or error}") from None


def _sweep_deleted(home: Path) -> None:
    """Runs beside a new one whose removal was cut short, an hour ago or more: they hold as much disk as runs do."""
    for path in home.glob(f"{files.OLD}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 60 * YOUNG:
                files.remove_tree(path)


def sweep(run: Path) -> None:
    """Remove what is half-written in the run directory ``run``. Its lock is held."""
    with contextlib.suppress(OSError):
        files.unlink(run / underway.NOTE)
    for folder in (run, run / "samples", run / "state", run / "checkpoints"):
        for path in _half_written(folder):
            try:
                if path.is_dir():
                    files.remove_tree(path)
                elif folder.name == "checkpoints" or time.time() - path.stat().st_mtime > YOUNG:
                    files.unlink(path)
            except OSError as error:
                log.warning("the unfinished %s could not be removed: %s", path.name, error)


def _half_written(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    checkpoints = folder.name == "checkpoints"
    return [folder / n for n in names if n.startswith(files.PART) or (checkpoints and n.endswith(".safetensors.part"))]

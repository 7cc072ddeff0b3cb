"""The runs in a folder, and which run lies where."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .run import RunDirectory

log = logging.getLogger(__name__)


def find_runs(folder: str | os.PathLike[str]) -> list[RunDirectory]:
    """The runs directly below ``folder``, by name. What is none, or cannot be read, is left out."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is no folder: give the folder that holds the runs")
    runs = []
    for name in sorted(os.listdir(root)):
        if (root / name / "config.json").is_file():
            try:
                run = RunDirectory(root / name)
                _ = run.config
                runs.append(run)
            except ValueError as error:
                log.warning("run %s is left out: %s", root / name, error)
    return runs


def identity(path: str | os.PathLike[str]) -> str:
    """A text that changes when the run at ``path`` is created, deleted, made anew or rolled back, never by training."""
    try:
        run = RunDirectory(path)
        return f"{run.uid}.{run.rollbacks}"
    except ValueError:
        return "none"

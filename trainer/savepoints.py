"""Save points: whole copies of a run's state, one directory each, there or not there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import files
from .config import FORMAT_VERSION

log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{6,})$")
_LIST = "save.json"


@dataclass(frozen=True)
class SavePoint:
    """A whole copy of a run's state on disk."""

    step: int
    path: Path


def save_points(state: Path, uid: str) -> list[SavePoint]:
    """The whole save points of the run ``uid`` in the folder ``state``, oldest first."""
    names = os.listdir(state) if state.is_dir() else []
    found = [SavePoint(int(m[1]), state / m[0]) for m in map(_NAME.match, names) if m]
    return sorted((p for p in found if _is_whole(p.path, uid)), key=lambda p: p.step)


def write_save_point(state: Path, uid: str, step: int, write: Callable[[Path], None], keep: int = 1) -> SavePoint:
    """Make the save point of ``step`` from the files that ``write`` puts into the empty folder it is given.

    The folder gets its name only when all of it is on the disk; older save points but ``keep`` go after that.
    Whatever is raised, the save points there were stay whole and nothing of the new one remains. One that is there
    already is left as it is: a run passes each step once between two roll-backs, and those remove later ones.
    """
    final = state / f"step-{step:06d}"
    if final.exists():
        if _is_whole(final, uid):
            return SavePoint(step, final)
        files.remove_tree(final)
    part = state / f"{files.PART}{final.name}-{secrets.token_hex(4)}"
    part.mkdir(parents=True)
    try:
        write(part)
        sizes = {f.relative_to(part).as_posix(): f.stat().st_size for f in sorted(part.rglob("*")) if f.is_file()}
        files.write_json(part / _LIST, {"format": FORMAT_VERSION, "uid": uid, "step": step, "files": sizes})
        files.sync_tree(part)
        files.replace(part, final)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove_tree(part)
        raise
    files.sync_directory(state)
    prune(state, uid, keep)
    return SavePoint(step, final)


def prune(state: Path, uid: str, keep: int) -> None:
    """Remove all but the newest ``keep`` save points. One that cannot be removed is only in the way."""
    for point in save_points(state, uid)[:-keep]:
        try:
            files.remove_tree(point.path)
        except OSError as error:
            log.warning("the old save point %s could not be removed: %s", point.path.name, error)


def clear(state: Path) -> None:
    """Remove what an earlier run has left in ``state``: its save points, whole or not."""
    for name in os.listdir(state):
        if _NAME.match(name) or name.startswith(files.PART):
            files.remove_tree(state / name)


def _is_whole(point: Path, uid: str) -> bool:
    """Whether it is that run's, and every file that was there when it was made still is, at its size."""
    try:
        made = files.read_json(point / _LIST)
        sizes = made["files"].items()
        return made["uid"] == uid and all((point / name).stat().st_size == size for name, size in sizes)
    except (ValueError, KeyError, OSError, AttributeError):
        return False

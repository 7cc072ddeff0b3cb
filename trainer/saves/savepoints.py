"""Save points: whole copies of a run's state, one directory each, there or not there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .. import files
from ..config import FORMAT_VERSION

log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{6,})$")
_DAMAGED = ".damaged"
"""Suffix of a save point that was found damaged and is not looked at any more."""
_LIST = "save.json"


@dataclass(frozen=True)
class Source:
    """What a run goes on from when it is opened: a save point or, ``fresh``, weights with moments of zero."""

    step: int
    path: Path
    """The save point's folder; or a weights-only checkpoint, a .safetensors file."""
    fresh: bool = False
    """Whether only the weights are taken: the moments begin at zero. Always so for a checkpoint."""
    sha256: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Hashes of a save point's files by name, as they were when it was written."""


def save_points(state: Path, uid: str) -> list[Source]:
    """The whole save points of the run ``uid`` in the folder ``state``, oldest first."""
    found = (_read(step, path, uid) for step, path in _folders(state))
    return sorted((point for point in found if point is not None), key=lambda p: p.step)


def damaged(state: Path, uid: str) -> list[tuple[int, Path]]:
    """Step and folder of the run's save points that are not whole, oldest first."""
    return sorted((step, path) for step, path in _folders(state) if _is_ours(path, uid) and not _read(step, path, uid))


def write_save_point(
    state: Path, uid: str, step: int, write: Callable[[Path], Mapping[str, str] | None], keep: int = 1
) -> Source:
    """Make the save point of ``step`` from the files that ``write`` puts into the empty folder it is given.

    ``write`` may return the SHA-256 of files that it hashed as it wrote them, and brought to the disk. The folder gets
    its name only when all of it is there; older save points but ``keep`` go after that, and damaged ones. Where there
    is no room otherwise, those of them go before that are older than the newest. ``WriteFailed`` or ``DiskFull`` if it
    fails: the save points that remain are whole, and nothing of the new one is left. One that is there already is left
    as it is: a run passes each step once between two roll-backs, and those remove later ones.
    """
    final = state / f"step-{step:06d}"
    try:
        if final.exists():
            if (there := _read(step, final, uid)) is not None:
                return there
            files.remove_tree(final)
        try:
            hashes = _write(final, uid, step, write)
        except files.DiskFull:
            if not _prune(state, uid, max(keep - 1, 1)):
                raise
            log.warning("there was no room for the save point of step %d beside all older ones", step)
            hashes = _write(final, uid, step, write)
    except OSError as error:
        raise files.WriteFailed(f"the save point of step {step} could not be written to {state}:"
                                f" {error.strerror or error}; look after that disk") from error
    _prune(state, uid, keep)
    for _, path in damaged(state, uid):
        _remove(path)
    for path in (*state.glob(f"step-*{_DAMAGED}"), *state.glob(f"{files.OLD}*")):
        _remove(path)
    return Source(step, final, sha256=hashes)


def _write(final: Path, uid: str, step: int, write: Callable[[Path], Mapping[str, str] | None]) -> Mapping[str, str]:
    part = final.with_name(f"{files.PART}{final.name}-{secrets.token_hex(4)}")
    part.mkdir(parents=True)
    try:
        known = write(part) or {}
        paths = {f.relative_to(part).as_posix(): f for f in sorted(part.rglob("*")) if f.is_file()}
        sizes = {name: f.stat().st_size for name, f in paths.items()}
        hashes = {name: known.get(name) or _settled(f) for name, f in paths.items()}
        made = {"format": FORMAT_VERSION, "uid": uid, "step": step, "files": sizes, "sha256": hashes}
        files.write_json(part / _LIST, made)
        for folder in {f.parent for f in paths.values()}:
            files.sync_directory(folder)
        files.replace(part, final)
    except BaseException as error:
        with contextlib.suppress(OSError):
            files.remove_tree(part)
        if isinstance(error, OSError) and files.no_room(error):
            raise files.DiskFull(f"no room in {final.parent} for the save point of step {step}: the disk is full;"
                                 " free some space or choose another disk") from error
        raise
    files.sync_directory(final.parent)
    return hashes


def _settled(path: Path) -> str:
    """The hash of a small file, which is brought to the disk."""
    with open(path, "r+b", buffering=0) as file:
        files.sync(file)
    return files.sha256(path)


def set_aside(point: Path) -> None:
    """Have a damaged save point be looked at no more; it is removed when the next one is whole."""
    files.replace(point, point.with_name(f"{point.name}-{secrets.token_hex(4)}{_DAMAGED}"))


def remove_later(state: Path, uid: str, step: int) -> None:
    """Remove what was saved after ``step``, whole or not: the newest first, so that what is left is always a past."""
    for at, path in sorted(_folders(state), reverse=True):
        if at > step and _is_ours(path, uid):
            files.remove_tree(path)


def _prune(state: Path, uid: str, keep: int) -> int:
    """Remove all but the newest ``keep`` save points; returns how many were. What cannot be is only in the way."""
    return sum(_remove(point.path) for point in save_points(state, uid)[:-keep])


def _remove(path: Path) -> bool:
    """What is held open elsewhere, as Windows does not let be removed, is not waited for: the next save tries again."""
    try:
        files.remove_tree(path, seconds=0.0)
    except OSError as error:
        log.warning("the old save point %s could not be removed: %s", path.name, error)
        return False
    return True


def clear(state: Path) -> None:
    """Remove what an earlier run has left in ``state``: its save points, whole or not."""
    for name in os.listdir(state):
        if _NAME.match(name) or name.startswith(files.PART) or name.endswith(_DAMAGED):
            files.remove_tree(state / name)


def missing(point: Path) -> list[str]:
    """What is plainly wrong with the save point in the folder ``point``, a line each: files gone, or of other sizes."""
    try:
        sizes = files.read_json(point / _LIST)["files"]
        found = {name: (point / name).stat().st_size if (point / name).is_file() else None for name in sizes}
    except (ValueError, KeyError, TypeError, OSError) as error:
        return [f"save point {point.name} is damaged: {error}"]
    lost = [f"{point / name} is gone" for name, size in found.items() if size is None]
    changed = [name for name, size in found.items() if size not in (None, sizes[name])]
    return lost + [f"{point / name} has {found[name]:,} bytes and had {sizes[name]:,}" for name in changed]


def verify(point: Path) -> list[str]:
    """What is wrong with the save point in the folder ``point``, a line each, after reading all of it; else nothing."""
    if wrong := missing(point):
        return wrong
    hashes = files.read_json(point / _LIST).get("sha256", {})
    return [problem for name in sorted(hashes) if (problem := _differs(point / name, hashes[name]))]


def hashed(point: Path) -> bool:
    """Whether the save point in the folder ``point`` has its files' hashes; those of older versions have none."""
    try:
        return bool(files.read_json(point / _LIST).get("sha256"))
    except ValueError:
        return False


def _differs(path: Path, wanted: str) -> str:
    try:
        return "" if files.sha256(path) == wanted else f"{path} is not as it was written: its disk is failing"
    except files.Damaged as error:
        return str(error)


def _folders(state: Path) -> Iterator[tuple[int, Path]]:
    names = os.listdir(state) if state.is_dir() else []
    return ((int(m[1]), state / m[0]) for m in map(_NAME.match, names) if m)


def _is_ours(point: Path, uid: str) -> bool:
    """Whether it is that run's, as far as it can be told."""
    try:
        return files.read_json(point / _LIST).get("uid", uid) == uid
    except ValueError:
        return True


def _read(step: int, point: Path, uid: str) -> Source | None:
    """The save point, if it is that run's, and every file that was there when it was made still is, at its size."""
    try:
        made = files.read_json(point / _LIST)
        whole = all((point / name).stat().st_size == size for name, size in made["files"].items())
        ours = made["uid"] == uid and made["step"] == step
        # An older version's have no hashes.
        return Source(step, point, sha256=made.get("sha256", {})) if whole and ours else None
    except (ValueError, KeyError, OSError, AttributeError):
        return None

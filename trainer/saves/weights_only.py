"""Weights-only checkpoints of a run in training: plain bf16 files that others can load, and that it may go back to."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import files
from ..header import HASH, NO_HASH, read_header
from .savepoints import Source

if TYPE_CHECKING:
    from ..weights import Entry

log = logging.getLogger(__name__)
_NAME = re.compile(r".+-step-(\d{6,})\.safetensors$")
RUN = "flux_fft.run"
"""Metadata: uid and roll-backs of the run that a checkpoint is of."""


def checkpoints(folder: Path, uid: str, *, damaged: bool = False) -> list[Source]:
    """The whole ones of the run ``uid`` in ``folder``, oldest first. What others have put there is left out.

    ``damaged``: also what is called like one and cannot be read.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    found = [Source(int(m[1]), folder / m[0], fresh=True) for m in map(_NAME.match, sorted(names)) if m]
    return sorted((one for one in found if _is_ours(one.path, uid, unread=damaged)), key=lambda one: one.step)


def write_checkpoint(
    folder: Path, name: str, run: str, step: int, entries: Sequence[Entry], metadata: Mapping[str, str],
    keep: int = 0, spare: Path | None = None,
) -> Path:  # fmt: skip
    """Write ``entries`` as ``folder/name-step-000500.safetensors``; one of that name is replaced by it.

    ``run``: ``uid.rollbacks``. Older ones but the newest ``keep`` (0: all) are removed once it is whole, or before
    where there is no room otherwise; never ``spare``. ``ValueError`` in one line if it fails: nothing is left then.
    """
    from ..weights import DiskFull, write_safetensors

    uid, path = run.partition(".")[0], folder / f"{name}-step-{step:06d}.safetensors"
    about = {**metadata, RUN: run, "flux_fft.steps": str(step), HASH: NO_HASH}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.WriteFailed(f"{folder} cannot be made: {error.strerror or error}") from None
    try:
        write_safetensors(path, entries, about, hashed=True)
    except DiskFull:
        if not (keep and _prune(folder, uid, max(keep - 1, 1), {spare, path})):
            raise
        write_safetensors(path, entries, about, hashed=True)
    if keep:
        _prune(folder, uid, keep, {spare, path})
    return path


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, a line each, after reading all of it; its header, where it holds no hash."""
    return look(path)[0]


def look(path: Path) -> tuple[list[str], bool]:
    """``verify``, and whether the checkpoint holds the hash of its data."""
    try:
        header = read_header(path)
        same = not header.hashed or f"0x{files.sha256(path, header.data_start)}" == header.metadata[HASH]
    except (ValueError, OSError) as error:
        return [" ".join(str(error).split())], False
    return [] if same else [f"{path} is not as it was written: its disk is failing"], header.hashed


def _prune(folder: Path, uid: str, keep: int, spared: set[Path | None]) -> int:
    removed = 0
    # Those of a past that was taken back go first, whatever step they are of.
    for old in sorted(checkpoints(folder, uid), key=lambda one: (_rollbacks(one.path), one.step))[:-keep]:
        if old.path not in spared:
            try:
                files.unlink(old.path, seconds=0.0)  # one that is held open, on Windows, is the next one's to remove
                removed += 1
            except OSError as error:
                log.warning("the old checkpoint %s could not be removed: %s", old.path.name, error)
    return removed


def _rollbacks(path: Path) -> int:
    return int(read_header(path).metadata[RUN].partition(".")[2] or 0)


def _is_ours(path: Path, uid: str, unread: bool = False) -> bool:
    try:
        return read_header(path).metadata.get(RUN, "").partition(".")[0] == uid
    except (ValueError, OSError):
        return unread

"""A save point or checkpoint that is being written, as any process can tell: of which step, and how much is there.

Who writes leaves a small note for as long as that takes; who asks measures what there is. So the writing costs no more,
and nothing has to be told over and over. The note of a worker that was killed is not looked at, for it lives no more,
and goes with what it had half-written when the run is opened next.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files

log = logging.getLogger(__name__)
NOTE = "saving.json"
SAVE_POINT, CHECKPOINT = "save point", "checkpoint"
_PARTS = {SAVE_POINT: f"state/{files.PART}step-{{:06d}}-*", CHECKPOINT: "checkpoints/*-step-{:06d}.safetensors.part"}
"""Where that lies which has not its name yet."""


@contextlib.contextmanager
def noted(run: Path, what: str, step: int, total: int) -> Iterator[None]:
    """While inside, ``saving`` tells that ``what`` (``SAVE_POINT`` or ``CHECKPOINT``) of ``total`` bytes is written in
    the run directory ``run``. Without room for the note it is done untold."""
    note = run / NOTE
    try:
        with open(note, "wb", buffering=0) as file:
            files.write(file, json.dumps({"what": what, "step": step, "total": total}).encode())
    except OSError as error:
        log.warning("%s could not be written: %s", note, error.strerror or error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # nothing lies there that it tells of
            files.unlink(note)


def saving(run: Path) -> dict[str, Any] | None:
    """``what`` is being written of which ``step``, and bytes ``done`` of ``total``; None: nothing.

    ``run``: the directory of a run whose worker lives. It costs a look for one file where nothing is written.
    """
    try:
        told = files.read_json(run / NOTE)
        parts = list(run.glob(_PARTS[told["what"]].format(told["step"])))
        done = sum(f.stat().st_size for part in parts for f in (part.iterdir() if part.is_dir() else (part,)))
        return {**told, "done": min(done, told["total"])} if parts else None
    except (ValueError, KeyError, TypeError, OSError):  # it is done just now
        return None

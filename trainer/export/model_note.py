"""What a run's Flux is, noted beside its settings: a save point needs no model file to go on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from .. import files

if TYPE_CHECKING:
    from ..flux.variants import FileInfo

log = logging.getLogger(__name__)


def noted_flux(note: Path, path: str, *, noted: bool) -> FileInfo:
    """What the Flux in the file ``path`` is, which goes into ``note``; if ``noted``, what was noted there before.

    ``ValueError`` in one line if it has to be looked at and cannot be trained.
    """
    from ..flux.variants import FileInfo, require_flux

    if noted:
        # Without the note, or with another version's, the file is looked at.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            known = files.read_json(note)
            known.pop("sha256", None)
            sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in known.pop("flux").items()}
            return FileInfo(path=path, flux=sizes, **known)
    info = require_flux(path)
    try:
        told = {k: v for k, v in dataclasses.asdict(info).items() if k != "path"}
        files.write_json(note, told | {"sha256": fingerprint_of(path)})
    except OSError as error:  # a full disk: it will do without
        log.warning("%s could not be written: %s", note, error.strerror or error)
    return info


def noted_fingerprint(note: Path, path: str) -> str:
    """The fingerprint of the Flux that the run began with, as noted; without a note, of the file ``path`` as it is."""
    with contextlib.suppress(ValueError, KeyError):
        return str(files.read_json(note)["sha256"])
    return fingerprint_of(path)


def fingerprint_of(path: str) -> str:
    """``flux.variants.fingerprint``, or "unknown" where the file is gone."""
    from ..flux.variants import fingerprint

    try:
        return fingerprint(path)
    except (OSError, ValueError):
        return "unknown"

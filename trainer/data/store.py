"""Entries of the cache: safetensors files with a checksum, written whole or not at all, checked when they are read."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

KINDS = {"latents": ("latent",), "captions": ("context", "pooled"), "masks": ("mask",)}
"""Kinds of entries, and the tensors that each holds: latent [16, h, w]; context [T, D] and pooled [P]; mask [h, w]."""

_DAMAGE = (ValueError, KeyError, TypeError)
_verified: dict[str, tuple[tuple[int, int, int] | None, tuple[int, ...] | None]] = {}
"""Entries whose checksum this process has seen to be right, as they were then: they are not all read at each start."""


class Cache:
    """A folder of entries. Several processes may use one at once: an entry's content depends on its key alone."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def path(self, kind: str, key: str) -> Path:
        """Where an entry lies: ``ROOT/kind/ab/abcdef....safetensors``."""
        assert kind in KINDS
        return self.root / kind / key[:2] / f"{key}.safetensors"

    def has(self, kind: str, key: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether the entry is there and whole (its checksum is verified). A damaged one is deleted, with a warning.

        ``shape``: what its first tensor must have.
        """
        path = str(self.path(kind, key))
        facts = (_facts(path), shape)
        if facts[0] is not None and _verified.get(path) == facts:
            return True
        data = self._bytes(kind, key)
        if data is None:
            return False
        try:
            first = _check(data, kind)
            if shape is not None and first != list(shape):
                raise ValueError(f"shape {first}, expected {list(shape)}")
        except _DAMAGE as error:
            self._drop(kind, key, error)
            return False
        _verified[path] = facts
        return True

    def read(self, kind: str, key: str) -> tuple[torch.Tensor, ...] | None:
        """The tensors of an entry on the CPU, or None if it is missing or damaged (then deleted, with a warning)."""
        from safetensors.torch import load

        data = self._bytes(kind, key)
        if data is None:
            return None
        try:
            _check(data, kind)
        except _DAMAGE as error:
            self._drop(kind, key, error)
            return None
        tensors = load(data)
        return tuple(tensors[name] for name in KINDS[kind])

    def write(self, kind: str, key: str, *tensors: torch.Tensor) -> None:
        """Store an entry in the dtypes given. Raises ``ValueError`` naming the folder if the disk is full."""
        from safetensors.torch import save

        names = KINDS[kind]
        assert len(tensors) == len(names)
        clean = {n: t.detach().to("cpu").contiguous().clone() for n, t in zip(names, tensors, strict=True)}
        data = _with_checksum(save(clean))
        path = self.path(kind, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, data)
        except OSError as error:
            if files.no_room(error):
                raise ValueError(f"the disk of the cache folder {self.root} is full: free some space there") from error
            raise ValueError(f"cannot write into the cache folder {self.root}: {error.strerror or error}") from error

    def _bytes(self, kind: str, key: str) -> bytes | None:
        # Read whole and closed at once: Windows cannot replace a file that is open or mapped.
        try:
            return self.path(kind, key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cache entry %s cannot be read (%s): it is made anew", self.path(kind, key), error)
            return None

    def _drop(self, kind: str, key: str, why: Exception) -> None:
        log.warning("cache entry %s is damaged (%s): it is made anew", self.path(kind, key), why)
        with contextlib.suppress(OSError):
            files.unlink(self.path(kind, key))


def _facts(path: str) -> tuple[int, int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(f"{files.PART}{path.name}-{secrets.token_hex(4)}")
    try:
        with open(part, "wb", buffering=0) as f:
            files.write(f, data)
            files.sync(f)
        files.replace(part, path)
    except BaseException:
        files.unlink(part)
        raise


def _split(data: bytes) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and where its data starts."""
    if len(data) < 8:
        raise ValueError("too short")
    (length,) = struct.unpack("<Q", data[:8])
    if length > len(data) - 8:
        raise ValueError("cut off")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("no header")
    return header, 8 + length


def _checksum(header: dict[str, Any], data: bytes, start: int) -> str:
    tensors = json.dumps({k: v for k, v in header.items() if k != "__metadata__"}, sort_keys=True)
    return f"{zlib.crc32(memoryview(data)[start:], zlib.crc32(tensors.encode('utf-8'))):08x}"


def _with_checksum(data: bytes) -> bytes:
    # Added after serialising, so that it covers exactly the bytes that are read back.
    header, start = _split(data)
    header["__metadata__"] = {"flux_fft": "cache", "crc32": _checksum(header, data, start)}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[start:]


def _check(data: bytes, kind: str) -> list[int]:
    """Raise ``ValueError`` unless this is a whole entry of ``kind``; return its first tensor's shape."""
    header, start = _split(data)
    if header["__metadata__"]["crc32"] != _checksum(header, data, start):
        raise ValueError("checksum differs")
    missing = [n for n in KINDS[kind] if n not in header]
    if missing:
        raise ValueError(f"no {missing[0]}")
    return header[KINDS[kind][0]]["shape"]

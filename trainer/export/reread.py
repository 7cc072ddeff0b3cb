"""A file that was just written, read again and compared with what it was written from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..weights import Entry, TensorFile, WriteFailed, dtype_name, file_bytes


def compare(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None,
            progress: Callable[[int, int], None] | None = None) -> str:
    """Read ``path`` back and compare it with what ``write_safetensors`` was given; the SHA-256 (hex) of its data.

    ``progress(done, total)`` counts bytes. Raises ``WriteFailed`` (one line) where a byte differs.
    """
    _forget_cached(path)
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with open(path, "rb", buffering=0) as file:
        for i, piece in enumerate(file_bytes(entries, metadata)):
            found = file.read(len(piece))
            if found != piece:
                raise WriteFailed(f"{path.name.removesuffix('.part')} reads back as something else than was written:"
                                  " check the disk, and export again")
            done += len(piece)
            if i:  # the first is the header
                digest.update(found)
            if progress is not None:
                progress(done, total)
    assert done == total, (done, total)
    return digest.hexdigest()


def copies(path: Path, names: dict[str, str] | None = None, chunk: int = 1 << 22) -> list[Entry]:
    """Entries that give the tensors of a file as they are (``names``: only these, under other names)."""

    def chunks(name: str, numel: int):
        with TensorFile(path) as file:
            for start in range(0, numel, chunk):
                yield file.read(name, start, min(start + chunk, numel))

    with TensorFile(path) as file:
        wanted = {name: name for name in file.tensors} if names is None else names
        return [Entry(new, dtype_name(file.dtype(old)), file.tensors[old].shape,
                      lambda old=old, numel=file.tensors[old].numel: chunks(old, numel))
                for old, new in wanted.items()]  # fmt: skip


def _forget_cached(path: Path) -> None:
    """Have the system read the file from the disk, where it can be told to: its memory of it proves nothing."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

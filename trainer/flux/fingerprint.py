"""What tells one model file, or one folder of parts, from another."""

from __future__ import annotations

import hashlib
import math
import os

from ..header import MAX_HEADER
from .folders import weight_files


def fingerprint(path: str | os.PathLike[str], samples: int = 256, sample_bytes: int = 16 * 1024) -> str:
    """SHA-256 (hex) of a file's size, its header and ``samples`` evenly spread pieces: 4 MB read, of any size.

    Files up to that size are read whole. Tells one model from another, and a training from its origin; not a proof that
    no byte differs. Works for any file. A model in several parts is told by all of them, whichever way it is named (its
    folder, its index, one of its parts). Raises ``OSError`` if it cannot be read, ``ValueError`` for a folder that
    holds no weights.
    """
    parts = weight_files(path)
    if len(parts) == 1:
        return _of_file(parts[0], samples, sample_bytes)
    whole = "".join(_of_file(part, samples, sample_bytes) for part in parts)
    return hashlib.sha256(whole.encode()).hexdigest()


def _of_file(path: str | os.PathLike[str], samples: int, sample_bytes: int) -> str:
    size = os.path.getsize(path)
    digest = hashlib.sha256(f"{size}\n".encode())
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        digest.update(start)
        if length <= MAX_HEADER and 8 + length <= size:
            digest.update(file.read(length))
        first = file.tell()
        if size - first <= samples * sample_bytes:
            digest.update(file.read())
        else:
            for i in range(samples):
                file.seek(first + math.floor((size - first - sample_bytes) * i / (samples - 1)))
                digest.update(file.read(sample_bytes))
    return digest.hexdigest()

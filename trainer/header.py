"""The header of a safetensors file, read without torch, and the hash of the data in it.

Format: https://github.com/huggingface/safetensors#format: eight bytes of length, that many bytes
of JSON, then the data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from . import files

MAX_HEADER = 100 * 1024 * 1024
"""Longest header in bytes that the safetensors library accepts."""
MOST_TENSORS = 100_000
"""More tensors than any model has."""
LIMIT = 2**63
"""Sizes and places are less than this; numbers without end would take minutes to multiply."""
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of each dtype name of the format."""
HASH = "modelspec.hash_sha256"
"""Metadata: the SHA-256 of the data."""
NO_HASH = "0x" + "0" * 64
"""Stands in a header for the hash of the data, which is known when all of it is written."""


class NotSafetensors(ValueError):
    """The file is no safetensors file at all."""


class Truncated(ValueError):
    """The file is a safetensors file that ends too early."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies."""

    dtype: str
    """Name in the format: ``BF16``, ``F32``, ..."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the beginning of the file."""
    stop: int
    """Byte after the last."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    """First byte of the data, counted from the beginning of the file."""
    size: int
    """Bytes of the whole file."""

    @property
    def hashed(self) -> bool:
        """Whether it holds the hash of the data; the checkpoints of older versions do not."""
        return self.metadata.get(HASH, NO_HASH) != NO_HASH


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of ``path``.

    Raises ``NotSafetensors`` or ``Truncated`` (both ``ValueError``), in one line that names the file; ``OSError`` where
    it cannot be opened.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER:
            raise NotSafetensors(f"{path} is not a safetensors file: it does not begin with a header's length")
        raw = file.read(length)
    if not raw.startswith(b"{"):
        raise NotSafetensors(f"{path} is not a safetensors file: its header is not JSON")
    if len(raw) < length:
        raise Truncated(f"{path} is cut short within its header: download or copy it again")
    try:
        table = json.loads(raw.decode("utf-8"))
        if len(table) > MOST_TENSORS:
            raise ValueError(f"it names {len(table):,} tensors")
        metadata = {str(k): str(v) for k, v in (table.pop("__metadata__", None) or {}).items()}
        tensors = {name: _tensor(entry, 8 + length) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise NotSafetensors(f"{path} is not a safetensors file: its header cannot be read ({error})") from error
    for name, tensor in tensors.items():
        bits = BITS.get(tensor.dtype)
        if bits is not None and (tensor.stop - tensor.start) * 8 != tensor.numel * bits:
            raise NotSafetensors(f"{path} is damaged: the size of {name} does not match its shape; download it again")
    end = max((t.stop for t in tensors.values()), default=8 + length)
    if end > size:
        raise Truncated(f"{path} is cut short: {size:,} of {end:,} bytes are there; download or copy it again")
    return Header(tensors, metadata, 8 + length, size)


def put_hash(path: Path, digest: str) -> None:
    """Put the hash of the data in the place that ``NO_HASH`` keeps for it in the header, on the disk."""
    with open(path, "r+b", buffering=0) as file:
        head = file.read(int.from_bytes(file.read(8), "little"))
        place = f'"{HASH}":"'.encode()
        at = head.find(place + NO_HASH.encode())
        assert at >= 0, "the header has no place for the hash"
        file.seek(8 + at + len(place))
        files.write(file, f"0x{digest}".encode())
        files.sync(file)


def _tensor(entry: dict, base: int) -> TensorInfo:
    begin, end = (int(v) for v in entry["data_offsets"])
    shape = tuple(int(v) for v in entry["shape"])
    if not 0 <= begin <= end < LIMIT or len(shape) > 64 or not all(0 <= side < LIMIT for side in shape):
        raise ValueError("a tensor lies outside of the data")
    return TensorInfo(str(entry["dtype"]), shape, base + begin, base + end)

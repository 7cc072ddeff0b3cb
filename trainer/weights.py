"""Checkpoints read and written chunk by chunk, so that 24 GB of weights never need 24 GB beside themselves.

Files are not mapped: a mapped file cannot be replaced on Windows, and its pages count as the process's memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from . import files
from .files import CHUNK_BYTES, DiskFull, WriteFailed, check_space
from .header import BITS, Header, NotSafetensors, TensorInfo, Truncated, put_hash, read_header

__all__ = [
    "DTYPES", "DiskFull", "Entry", "Header", "NotSafetensors", "TensorFile", "TensorInfo", "Truncated",
    "WriteFailed", "check_space", "dtype_name", "entry", "file_bytes", "load_weights_", "pieces", "read_header",
    "size_of", "write_safetensors",
]  # fmt: skip

log = logging.getLogger(__name__)
PathLike = str | os.PathLike[str]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    **{name: getattr(torch, f"uint{name[1:]}") for name in ("U16", "U32", "U64") if hasattr(torch, f"uint{name[1:]}")},
}  # fmt: skip
"""torch's dtype for each name of the format (unsigned ones where torch has them)."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype: ``F32`` for ``torch.float32``."""
    return _NAMES[dtype]


class TensorFile:
    """A safetensors file open for reading. Safe to use from several threads; close it, or use it in a ``with``."""

    def __init__(self, path: PathLike) -> None:
        """Raises ``ValueError`` (one line) where ``path`` is no whole safetensors file, ``OSError`` if unreadable."""
        self.path = Path(path)
        self.header = read_header(path)
        self._lock = threading.Lock()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.header.tensors

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor. Raises ``ValueError`` if torch has none such."""
        kind = self._info(name).dtype
        if kind not in DTYPES:
            raise ValueError(f"{self.path}: {name} is {kind}, which this version of torch cannot hold")
        return DTYPES[kind]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` (the end, if None) of a tensor, flat, in the file's dtype."""
        info, dtype = self._info(name), self.dtype(name)
        stop = info.numel if stop is None else stop
        assert 0 <= start <= stop <= info.numel, (name, start, stop, info.numel)
        out = torch.empty(stop - start, dtype=dtype)
        self._fill(info.start + start * dtype.itemsize, out)
        return out

    def read_into_(self, name: str, out: Tensor, start: int = 0, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Fill ``out`` with the elements of a tensor from ``start`` on, converted to ``out``'s dtype and device.

        ``out`` is contiguous. Where its dtype is the file's and it lies in host memory, no copy is made.
        """
        dtype = self.dtype(name)
        assert out.is_contiguous() and start + out.numel() <= self._info(name).numel, (name, start, out.shape)
        flat = out.detach().view(-1)
        if flat.dtype == dtype and flat.device.type == "cpu":
            return self._fill(self._info(name).start + start * dtype.itemsize, flat)
        step = max(1, chunk_bytes // dtype.itemsize)
        for first in range(0, flat.numel(), step):
            last = min(first + step, flat.numel())
            flat[first:last].copy_(self.read(name, start + first, start + last))

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole tensor in its shape, in ``dtype`` (the file's own, if None)."""
        out = torch.empty(self._info(name).shape, dtype=dtype or self.dtype(name))
        self.read_into_(name, out)
        return out

    def read_all_(self, targets: Mapping[str, Tensor]) -> str:
        """Fill ``targets`` (contiguous, in host memory, of the file's dtypes) and return the SHA-256 of the whole file.

        Every byte is read once, in order, and hashed where it has come to lie. Tensors without a target are passed
        over. Raises ``NotSafetensors`` where they do not lie one behind the other, as ``write_safetensors`` puts them.
        """
        digest, scratch = hashlib.sha256(), torch.empty(0, dtype=torch.uint8)
        with self._lock:
            self._file.seek(0)
            at = self.header.data_start
            self._take(memoryview(head := bytearray(at)))
            digest.update(head)
            for name, info in sorted(self.tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
                if info.start != at:
                    raise NotSafetensors(f"{self.path} is damaged: {name} does not lie where the one before it ends")
                target = targets[name].view(-1).view(torch.uint8) if name in targets else None
                for first in range(at, info.stop, CHUNK_BYTES):
                    count = min(CHUNK_BYTES, info.stop - first)
                    if target is None and scratch.numel() < count:
                        scratch = torch.empty(count, dtype=torch.uint8)
                    part = scratch[:count] if target is None else target[first - at : first - at + count]
                    self._take(part.numpy().data)
                    digest.update(part.numpy().data)
                at = info.stop
        return digest.hexdigest()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name}")
        return self.tensors[name]

    def _fill(self, offset: int, out: Tensor) -> None:
        """Fill the flat host tensor ``out`` with the bytes at ``offset``."""
        if not out.numel():
            return
        with self._lock:
            self._file.seek(offset)
            self._take(out.view(torch.uint8).numpy().data)

    def _take(self, view: memoryview) -> None:
        """Fill ``view`` with what comes next."""
        while view:
            count = self._file.readinto(view[: 2**30])  # some systems refuse more than 2 GB at once
            if not count:
                raise Truncated(f"{self.path} has been cut short while it was read: copy it again")
            view = view[count:]


def load_weights_(module: nn.Module, path: PathLike, names: Mapping[str, str] | None = None) -> None:
    """Fill the parameters of ``module`` from a file, each in its own dtype and on its own device.

    ``names`` gives the file's name of each parameter (its own, where absent). Raises ``ValueError`` if one is missing
    or of another shape.
    """
    with TensorFile(path) as file:
        for name, parameter in module.named_parameters():
            found = (names or {}).get(name, name)
            if found not in file.tensors:
                raise ValueError(f"{file.path} has no tensor {found}")
            if file.tensors[found].shape != tuple(parameter.shape):
                shapes = f"{list(file.tensors[found].shape)} where {list(parameter.shape)} is needed"
                raise ValueError(f"{file.path}: {found} has the shape {shapes}")
            file.read_into_(found, parameter)


@dataclass(frozen=True)
class Entry:
    """One tensor to be written."""

    name: str
    dtype: str
    """The format's name of the dtype to write: ``BF16``, ``F16``, ``F32``, ..."""
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Tensor]]
    """Gives the elements in order, in pieces of any size, shape, dtype and device. Called when its turn comes, and
    again to compare."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def entry(name: str, tensor: Tensor, dtype: str | None = None) -> Entry:
    """The entry of a tensor at hand, in ``dtype`` (its own, if None)."""
    return Entry(name, dtype or dtype_name(tensor.dtype), tuple(tensor.shape), lambda: iter((tensor,)))


def write_safetensors(
    path: PathLike,
    entries: Sequence[Entry],
    metadata: Mapping[str, str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] | None = None,
    inspect: Callable[[Path], None] | None = None,
    hashed: bool = False,
) -> None:
    """Write a safetensors file: streamed to ``path + ".part"``, flushed to the disk, then renamed over ``path``.

    At most ``chunk_bytes`` are converted at a time. Tensors of wider dtypes come first, so that each is aligned;
    otherwise the order is that of ``entries``. ``progress(done, total)`` counts bytes. ``inspect`` is given the
    whole file before it is renamed, and may change or refuse it by raising. ``hashed``: the SHA-256 of the data, taken
    in a thread beside the writing, is put where ``metadata`` has ``header.NO_HASH`` for it. Raises ``DiskFull`` or
    ``WriteFailed`` (one line; both ``ValueError``), and ``ValueError`` if a finite number does not fit into the dtype
    (float16 ends at 65504). Whatever is raised, no ``.part`` stays and an older ``path`` stays whole.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    needed, data, done = size_of(entries, metadata), sum(e.nbytes for e in entries), 0
    digest = hashlib.sha256() if hashed else None
    if not path.absolute().parent.is_dir():
        raise WriteFailed(f"cannot write {path}: the folder {path.absolute().parent} does not exist; create it")
    if path.is_dir():
        raise WriteFailed(f"cannot write {path}: a folder has that name; choose another name")
    check_space(path, needed)
    try:
        with open(part, "wb", buffering=0) as file, ThreadPoolExecutor(1, "hash") as beside:
            hashing = None
            for i, piece in enumerate(file_bytes(entries, metadata, chunk_bytes)):
                if hashing is not None:
                    hashing.result()  # one at a time
                if i and digest is not None:
                    hashing = beside.submit(digest.update, piece)
                files.write(file, piece)
                done += len(piece) if i else 0  # the first is the header
                if i and progress is not None:
                    progress(done, data)
            files.sync(file)
        if inspect is not None:
            inspect(part)
        if digest is not None:
            put_hash(part, digest.hexdigest())
        files.replace(part, path)
        files.sync_directory(path.absolute().parent)
    except OSError as error:
        _remove(part)
        if files.no_room(error):
            raise files.disk_full(path, needed) from error
        hint = "close what has it open, or choose another name" if path.exists() else "choose another folder"
        raise WriteFailed(f"cannot write {path}: {error.strerror or error}; {hint}") from error
    except BaseException:
        _remove(part)
        raise


def size_of(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> int:
    """Bytes of the file that ``write_safetensors`` makes of these."""
    return len(_header_bytes(entries, metadata or {})) + sum(e.nbytes for e in entries)


def file_bytes(
    entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file in order: its header, then parts of at most ``chunk_bytes``.

    Nothing is copied that lies in host memory in its dtype. Errors: see ``write_safetensors``.
    """
    yield _header_bytes(entries, metadata or {})
    for e in _in_order(entries):
        for piece in pieces(e, chunk_bytes):
            yield piece.numpy().data


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Wider dtypes first, so that each tensor is aligned."""
    return sorted(entries, key=lambda e: -BITS[e.dtype])


def _header_bytes(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": {str(k): str(v) for k, v in metadata.items()}} if metadata else {}
    offset = 0
    for e in _in_order(entries):
        assert e.name not in table, f"{e.name} twice"
        stop = offset + e.nbytes
        table[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [offset, stop]}
        offset = stop
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def pieces(e: Entry, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
    """The bytes of an entry as they are written, in pieces of at most ``chunk_bytes``."""
    dtype, count = DTYPES[e.dtype], 0
    step = max(1, chunk_bytes // dtype.itemsize)
    for chunk in e.chunks():
        for piece in chunk.detach().reshape(-1).split(step):
            converted = piece.to(device="cpu", dtype=dtype).contiguous()
            if dtype == torch.float16 and piece.dtype != dtype:
                lost = converted.isinf() & ~piece.isinf().cpu()
                if lost.any():
                    raise ValueError(f"{e.name} has values too large for float16: choose bf16 or f32")
            count += piece.numel()
            yield converted.view(torch.uint8)
    assert count == math.prod(e.shape), f"{e.name}: {count} elements for the shape {e.shape}"


def _remove(part: Path) -> None:
    try:
        files.unlink(part)
    except OSError as error:
        log.warning("could not remove %s: %s", part, error)

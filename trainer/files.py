"""Files that are whole or absent, and locks that die with the process that holds them.

Written for Windows too: a file that is open elsewhere cannot be replaced or removed there, so both are tried again
for a moment. No process id is ever trusted: ids are used again, and a copied directory brings foreign ones along.

Whatever a run puts on the disk goes through ``write``, ``sync``, ``replace``, ``unlink`` and ``remove_tree``: so a test
can end the process, or fill the disk, at each of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .progress import size

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

PART = ".part-"
"""Prefix of what is being written, or being removed: never read, deleted at the next start."""
OLD = f"{PART}old-"
"""Prefix of a folder that is being removed."""
PATIENCE = 10.0
"""Seconds for which a file that is held elsewhere is waited for, on Windows."""
CHUNK_BYTES = 32 * 2**20
"""The most that is read, converted or written at once."""
WINDOWS = os.name == "nt"
_LOCK_BYTE = 1 << 30
"""Windows locks bytes, and a locked byte cannot be read: take one that no file of ours reaches."""

failpoint: Callable[[str, Path], None] | None = None
"""Called, where tests have set it, before each write, flush, rename and removal, with which of them it is and of what:
it may end the process, or raise what a disk raises."""


class WriteFailed(ValueError):
    """A file could not be written; the message names it and says what to do."""


class DiskFull(WriteFailed):
    """There is no room for a file."""


class Damaged(ValueError):
    """A file is not what was written; the message names it."""


def _about_to(deed: str, path: str | os.PathLike[str]) -> None:
    if failpoint is not None:
        failpoint(deed, Path(path))


def write(file: IO[bytes], data: Any) -> None:
    """Write all the bytes of ``data`` to a file that was opened without a buffer."""
    _about_to("write", file.name)
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest[: 2**30]) :]  # some systems refuse more than 2 GB at once


def sync(file: IO[bytes]) -> None:
    """Bring what was written to the disk, should the power fail."""
    _about_to("sync", file.name)
    os.fsync(file.fileno())


def forget(file: IO[bytes]) -> None:
    """Have the system not remember a file that is on the disk: rather than that, it would swap out what is in use."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def no_room(error: OSError) -> bool:
    """Whether an error of the system says that the disk, a quota or the largest file is full."""
    return error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def disk_full(path: str | os.PathLike[str], needed: int) -> DiskFull:
    """The error for ``needed`` bytes that do not fit on the disk of ``path``, a folder or a file to be."""
    return DiskFull(
        f"no room for {path}: {size(needed)} are needed and {size(_free(path))} are free;"
        " free some space or choose another disk"
    )


def check_space(path: str | os.PathLike[str], needed: int) -> None:
    """Raise ``DiskFull`` unless the disk of ``path``, a folder or a file to be, has ``needed`` bytes free."""
    if _free(path) < needed:
        raise disk_full(path, needed)


def _free(path: str | os.PathLike[str]) -> int:
    whole = Path(path).absolute()
    return shutil.disk_usage(whole if whole.is_dir() else whole.parent).free


def sha256(path: Path, start: int = 0) -> str:
    """The SHA-256 of a file from byte ``start`` on, in hexadecimal. ``Damaged`` where the disk cannot read it."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(CHUNK_BYTES, 1 + path.stat().st_size)))
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write ``text`` as UTF-8 beside ``path``, to the disk, then under its name."""
    part = path.with_name(f"{PART}{path.name}-{secrets.token_hex(4)}")
    try:
        with open(part, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write(file, text.encode("utf-8"))
            sync(file)
        replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, data: Any, *, mode: int = 0o644) -> None:
    """Like ``write_text``, for JSON."""
    write_text(path, json.dumps(data, indent=2) + "\n", mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. ``ValueError`` names the file where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object")
    return data


def replace(source: Path, target: Path, seconds: float = PATIENCE) -> None:
    """``os.replace``, tried for a while: a virus scanner or a reader may hold either on Windows."""
    _about_to("rename", target)
    _persist(lambda: os.replace(source, target), seconds)


def unlink(path: Path, seconds: float = PATIENCE) -> None:
    """Remove a file, if it is there."""
    _about_to("remove", path)
    _persist(lambda: path.unlink(missing_ok=True), seconds)


def remove_tree(path: Path, seconds: float = PATIENCE) -> None:
    """Remove a directory so that no instant shows half of it under its own name."""
    doomed = path
    if not path.name.startswith(PART):
        doomed = path.with_name(f"{OLD}{path.name}-{secrets.token_hex(4)}")
        replace(path, doomed, seconds)
    _about_to("remove", doomed)
    _persist(lambda: shutil.rmtree(doomed), seconds)


def _persist(action: Callable[[], None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except PermissionError:
            if not WINDOWS or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` survive a power cut (Windows does so by itself)."""
    _about_to("sync", path)
    if WINDOWS:
        return
    # Some network file systems cannot open or sync a directory; nothing better exists there.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            os.lseek(file.fileno(), _LOCK_BYTE, os.SEEK_SET)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[name-defined]
    except (BlockingIOError, PermissionError):
        return False
    return True


def _unlock(file: IO[bytes]) -> None:
    if fcntl is not None:
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    else:
        os.lseek(file.fileno(), _LOCK_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)  # type: ignore[name-defined]


@contextlib.contextmanager
def exclusive(file: IO[bytes], timeout: float) -> Iterator[bool]:
    """Hold the system's lock of an open file. Yields False where another holds it beyond ``timeout`` seconds.

    The lock belongs to this opening of the file: other openings are shut out in this process too, and it ends with
    the process, however that ends.
    """
    deadline = time.monotonic() + timeout
    while not (got := _try_lock(file)) and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield got
    finally:
        if got:
            _unlock(file)


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock of the file ``path``. Never creates it."""
    try:
        # Reading is enough for a lock on POSIX, and a run on a read-only disk can still be looked at.
        with open(path, "rb" if fcntl is not None else "r+b") as file, exclusive(file, 0) as free:
            return not free
    except FileNotFoundError:
        return False

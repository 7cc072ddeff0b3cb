"""Files that are whole or absent, and locks that die with the process that holds them.

Written for Windows too: a file that is open elsewhere cannot be replaced or removed there, so both are tried again
for a moment. No process id is ever trusted: ids are used again, and a copied directory brings foreign ones along.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    import msvcrt

PART = ".part-"
"""Prefix of what is being written, or being removed: never read, deleted at the next start."""
_LOCK_BYTE = 1 << 30
"""Windows locks bytes, and a locked byte cannot be read: take one that no file of ours reaches."""


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write ``text`` as UTF-8 beside ``path``, to the disk, then under its name."""
    part = path.with_name(f"{PART}{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
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


def replace(source: Path, target: Path) -> None:
    """``os.replace``, tried for two seconds: a virus scanner or a reader may hold either on Windows."""
    _persist(lambda: os.replace(source, target))


def remove_tree(path: Path) -> None:
    """Remove a directory so that no instant shows half of it under its own name."""
    doomed = path
    if not path.name.startswith(PART):
        doomed = path.with_name(f"{PART}old-{path.name}-{secrets.token_hex(4)}")
        replace(path, doomed)
    _persist(lambda: shutil.rmtree(doomed))


def _persist(action: Any, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return action()
        except PermissionError:
            if os.name != "nt" or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` survive a power cut (Windows does so by itself)."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems cannot sync a directory; nothing better exists there.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Bring every file under ``path``, and the directories, to the disk."""
    for directory, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(directory, name), "r+b") as file:
                os.fsync(file.fileno())
        sync_directory(Path(directory))


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

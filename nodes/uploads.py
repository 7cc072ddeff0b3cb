"""Datasets that are dropped on the canvas: files and zips received into a hidden folder, which then gets its name.

Only pictures and what describes them is kept. A name that leads out of the folder, a zip that unpacks to far more than
it holds, or a disk that fills, ends the upload with one line, and nothing of it remains.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import stat
import threading
import time
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from ..trainer.files import PART, remove_tree, replace

OTHER_TEXTS = (".json", ".jsonl", ".csv")
"""What captions come in besides a text file for each picture."""
MOST_FILES = 200_000
LEFT_FREE = 1 << 30
"""Bytes of the disk that stay free."""
MOST_GROWTH, SMALL = 200, 256 << 20
"""A zip may unpack to so many times its size, or to this many bytes."""
CHUNK = 1 << 20
_STALE = 24 * 3600.0
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
_JUNK = ("__macosx", "thumbs.db", "desktop.ini")


def parts(path: str) -> tuple[str, ...]:
    """The folders and the file name of a relative path. ``ValueError`` if it would not do on every system."""
    shown = path if len(path) < 100 else f"...{path[-100:]}"
    found = tuple(path.replace("\\", "/").split("/"))
    for part in found:
        wrong = part in ("", ".", "..") or part.strip(" ") != part or part.endswith(".") or _DEVICES.fullmatch(part)
        odd = any(c in '<>:"|?*' or ord(c) < 32 or "\ud800" <= c <= "\udfff" for c in part)
        if wrong or odd or len(part.encode("utf-8", "replace")) > 200:
            raise ValueError(f"the file name {shown!r} cannot be used on every system, or leads out of its folder: "
                             "rename it and drop the pictures again")
    if len(found) > 30:
        raise ValueError(f"{shown!r} lies too many folders deep: move it up")
    return found


def kind(path: str) -> str:
    """``picture`` or ``text`` by the file's name; empty: it does not belong into a dataset."""
    from ..trainer.data import captions, images

    extension = Path(path.replace("\\", "/").rpartition("/")[2]).suffix.lower()
    # Raw photographs are taken, so that the scan can say that it does not read them.
    if extension in images.extensions() | images.RAW_EXTENSIONS:
        return "picture"
    return "text" if extension in (*captions.EXTENSIONS, *OTHER_TEXTS) else ""


def folder_name(text: str) -> str:
    """A plain folder name like ``text``."""
    name = re.sub(r'[<>:"/\\|?*\x00-\x1f\ud800-\udfff]+', " ", text).strip(" .")[:80].strip(" .")
    return name if name and not _DEVICES.fullmatch(name) else "pictures"


class Upload:
    """One dataset on its way into ``root``."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, folder_name(name)
        self.id = secrets.token_hex(8)
        self.folder = root / f"{PART}dataset-{self.id}"
        self.pictures = self.texts = self.skipped = self.bytes = 0
        self.touched = time.time()
        """When something of it came last, in seconds since 1970."""
        self._lock = threading.Lock()
        self.folder.mkdir(parents=True)

    def place(self, path: str) -> Path | None:
        """Where the file of this relative path is to be written; None: it does not belong into a dataset."""
        # First by its kind: an odd name is nothing to end for, if the file is left out anyway.
        what = kind(path)
        found = parts(path) if what else ()
        with self._lock:
            self.touched = time.time()
            if not what or any(part.startswith(".") or part.lower() in _JUNK for part in found):
                self.skipped += 1
                return None
            if self.pictures + self.texts >= MOST_FILES:
                raise ValueError(f"more than {MOST_FILES:,} files: drop fewer at once")
            target = self.folder.joinpath(*found)
            if not target.resolve().is_relative_to(self.folder.resolve()) or target.exists():
                raise ValueError(f"{path[-100:]!r} is there twice: rename one")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
            self.pictures += what == "picture"
            self.texts += what == "text"
        return target

    def write(self, file: IO[bytes], data: bytes) -> None:
        """Write a piece of a file, if the disk has room for it."""
        if shutil.disk_usage(self.root).free < LEFT_FREE + len(data):
            raise ValueError(f"the disk of {self.root} is nearly full: free some space")
        file.write(data)
        with self._lock:
            self.bytes += len(data)
            self.touched = time.time()

    def spool(self) -> Path:
        """Where a zip is put until it is unpacked."""
        return self.folder / f"{PART}{secrets.token_hex(4)}.zip"

    def unpack(self, archive: Path) -> None:
        """Take in what a zip holds, and remove it. ``ValueError`` for one that is damaged, encrypted or a bomb."""
        size = archive.stat().st_size
        with self._lock:
            self.bytes -= size
        most = self.bytes + max(MOST_GROWTH * size, SMALL)
        try:
            with zipfile.ZipFile(archive) as opened:
                for info in opened.infolist():
                    if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
                        self._unpack_one(opened, info, most)
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, zlib.error) as error:
            said = "it is encrypted" if "encrypt" in str(error) or "password" in str(error) else str(error)
            raise ValueError(f"the zip cannot be unpacked ({said}): unpack it yourself and drop its folder") from None
        archive.unlink()

    def _unpack_one(self, opened: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> None:
        target = self.place(info.filename)
        if target is None:
            return
        with opened.open(info) as source, open(target, "wb") as file:
            while data := source.read(CHUNK):
                if self.bytes + len(data) > most:
                    raise ValueError("the zip unpacks to far more than pictures do: unpack it yourself, look at what "
                                     "it holds, and drop its folder")
                self.write(file, data)

    def finish(self) -> dict[str, Any]:
        """Give the folder its name, or the next free one: ``folder``, ``pictures``, ``texts``, ``skipped``, ``bytes``.

        ``ValueError`` where it holds no picture.
        """
        if not self.pictures:
            raise ValueError("there are no pictures in what was dropped: drop a folder or a zip of pictures, with "
                             "their captions in text files beside them")
        for number in range(1, 10_000):
            name = self.name if number == 1 else f"{self.name}_{number}"
            if not (self.root / name).exists():
                replace(self.folder, self.root / name)
                return {"folder": name, "pictures": self.pictures, "texts": self.texts, "skipped": self.skipped,
                        "bytes": self.bytes}
        raise ValueError(f"there are too many folders called {self.name} in {self.root}: remove some")

    def drop(self) -> None:
        """Remove what has come."""
        with contextlib.suppress(OSError):
            remove_tree(self.folder)


class Uploads:
    """The uploads under way. Those that were given up are removed when another begins, a day later."""

    def __init__(self) -> None:
        self._open: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def begin(self, root: Path, name: str) -> Upload:
        self._sweep(root)
        upload = Upload(root, name)
        with self._lock:
            self._open[upload.id] = upload
        return upload

    def get(self, key: str) -> Upload:
        with self._lock:
            if key not in self._open:
                raise FileNotFoundError("this upload is over, or failed: drop the pictures again")
            return self._open[key]

    def end(self, key: str) -> Upload:
        """Take it out of those under way."""
        upload = self.get(key)
        with self._lock:
            self._open.pop(key, None)
        return upload

    def _sweep(self, root: Path) -> None:
        with self._lock:
            for upload in [u for u in self._open.values() if time.time() - u.touched > _STALE]:
                del self._open[upload.id]
            known = {upload.folder for upload in self._open.values()}
        for folder in root.glob(f"{PART}dataset-*") if root.is_dir() else ():
            with contextlib.suppress(OSError):
                if folder not in known and time.time() - folder.stat().st_mtime > _STALE:
                    remove_tree(folder)

"""What lies in a dataset folder: every file once, and what it is by name or content."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import images
from .captions import EXTENSIONS as CAPTION_EXTENSIONS
from .captions import stem_of
from .masks import is_mask
from .paths import find_folder, long_path, natural, shown
from .tables import is_table

_OF_THE_SYSTEM = frozenset((
    "__MACOSX", "Thumbs.db", "desktop.ini", "$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir",
    "#recycle",
))  # fmt: skip
"""Names of files and folders that systems and network drives put among a user's own; some hold small pictures."""
LONE = "is a caption file, but no picture is called so"


@dataclass(kw_only=True)
class Listing:
    """The files of a folder and its sub-folders, as paths relative to it, in their natural order."""

    folder: Path
    pictures: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    captions: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Names of caption files, by folder and by name without extension."""
    ignored: int = 0
    """Files that are no pictures to train, masks among them."""
    unlisted: list[tuple[str, str]] = field(default_factory=list)
    """Folders that cannot be looked into, and why."""

    def lone_captions(self) -> list[tuple[str, str]]:
        """Caption files that are called like no picture beside them, each with what is to be said of it.

        It is told where a picture there is called so but for capitals, spaces, how its accents are written, or one
        extension too many (``a.txt.txt``, ``a.png.txt`` of an ``a.jpg``). A ``.json`` is told only there: others are
        of other programs.
        """
        beside: dict[str, list[str]] = {}
        for picture in self.pictures:
            head, name = os.path.split(picture)
            beside.setdefault(head, []).append(name)
        found = []
        for head, files in self.captions.items():
            names = beside.get(head, [])
            known = {key for name in names for key in (stem_of(name), name)}
            lone = [(stem, file) for stem, all_of in files.items() if stem not in known for file in all_of]
            alike = {_alike(stem_of(name)): name for name in names} if lone else {}
            for stem, file in lone:
                if not is_table(file):
                    almost = alike.get(_alike(stem)) or alike.get(_alike(_without_extension(stem)))
                    hint = f" ({shown(almost)} almost is)" if almost else ""
                    if hint or not file.lower().endswith(".json"):
                        found.append((shown(os.path.join(head, file)), f"{LONE}{hint}"))
        return found


def _without_extension(name: str) -> str:
    stem, extension = os.path.splitext(name)
    known = extension.lower() in CAPTION_EXTENSIONS or extension.lower() in _picture_extensions()
    return stem if known else name


def _alike(name: str) -> str:
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", name).casefold())


def list_folder(text: str) -> Listing:
    """What is in the folder that a person means by ``text``. Raises ``ValueError`` if there is none."""
    found = Listing(folder=find_folder(text))
    files = dict(_files(found.folder, found.unlisted))
    for relative in sorted(files, key=natural):
        kind = _kind(relative, files[relative])
        if kind == "picture" and is_mask(relative):
            found.masks.append(relative)
        elif kind == "picture":
            found.pictures.append(relative)
            continue
        elif kind == "other" and not _hidden(relative):
            head, name = os.path.split(relative)
            stem, extension = os.path.splitext(name)
            if extension.lower() in CAPTION_EXTENSIONS:
                found.captions.setdefault(head, {}).setdefault(stem, []).append(name)
            if is_table(relative):
                found.tables.append(relative)
        found.ignored += 1
    return found


def state_of(text: str) -> str:
    """A hash that changes whenever a file in the folder does: of names, sizes and times, nothing is opened.

    Empty where there is no such folder. Hidden files, which the system writes when it likes, do not count.
    """
    try:
        folder = find_folder(text)
    except ValueError:
        return ""
    digest, files = hashlib.sha256(), []
    for relative, entry in _files(folder, []):
        if _hidden(relative):
            continue
        try:
            info = os.stat(long_path(folder / relative)) if entry.is_symlink() else entry.stat()
            files.append((relative, info.st_size, info.st_mtime_ns, info.st_ctime_ns))
        except OSError:
            files.append((relative, 0, 0, 0))
    for facts in sorted(files):
        digest.update(repr(facts).encode("ascii", "backslashreplace"))
    return digest.hexdigest()


def _files(folder: Path, unlisted: list[tuple[str, str]]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Relative paths of all files, each real directory once, however many links lead to it."""
    seen: set[tuple[int, int] | str] = set()
    real, linked = [""], []
    while real or linked:
        here = real.pop() if real else linked.pop()
        try:
            place = long_path(folder / here)
            info = os.stat(place)
            # Some network drives number no files: there the resolved path has to do.
            identity = (info.st_dev, info.st_ino) if info.st_ino else os.path.realpath(place)
            if identity in seen:
                continue
            seen.add(identity)
            entries = list(os.scandir(place))
        except OSError as error:
            unlisted.append((shown(here or "."), f"cannot be listed ({error.strerror or error})"))
            continue
        for entry in entries:
            relative = os.path.join(here, entry.name)
            try:
                if entry.is_dir():
                    (linked if entry.is_symlink() else real).append(relative)
                    continue
            except OSError:
                pass
            yield relative, entry


def _hidden(relative: str) -> bool:
    """The system's own: thumbnails, waste, AppleDouble files, version control."""
    parts = relative.split(os.sep)
    return any(part.startswith(".") or part in _OF_THE_SYSTEM for part in parts)


def _kind(relative: str, entry: os.DirEntry[str]) -> str:
    """``picture`` by name or content (whether it can be used or not), else ``other``."""
    if _hidden(relative):
        return "other"
    extension = os.path.splitext(relative)[1].lower()
    named = extension in _picture_extensions()
    try:
        # Asked before opening: to open a pipe is to wait for its writer.
        if not entry.is_file():
            gone = entry.is_symlink() and not os.path.exists(entry.path)  # a link to nothing: the decoder says so
            return "picture" if named and gone else "other"
    except OSError:
        return "picture" if named else "other"
    if named:
        return "picture"
    if extension in CAPTION_EXTENSIONS:
        return "other"
    try:
        if entry.stat().st_size == 0:  # some of the system's own block who reads them
            return "other"
        with open(entry.path, "rb") as f:
            return "picture" if images.looks_like_picture(f.read(32)) else "other"
    except OSError:
        return "other"


@functools.cache
def _picture_extensions() -> frozenset[str]:
    return images.extensions() | images.RAW_EXTENSIONS | images.OTHER_EXTENSIONS

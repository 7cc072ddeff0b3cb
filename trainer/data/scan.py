"""What a folder holds to train on, found out before any model loads.

Every picture is decoded wholly, so that a damaged one is named now and not in the middle of a run; every file is
accounted for, as usable, skipped with a reason, or ignored because it is no picture.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DatasetConfig
from . import images
from .buckets import bucket_for, cropped_share, enlargement
from .captions import EXTENSIONS as CAPTION_EXTENSIONS
from .captions import caption_for
from .paths import find_folder, long_path, natural, shown
from .pool import ordered_map

if TYPE_CHECKING:
    import argparse

log = logging.getLogger(__name__)

MUCH_CROPPED = 1 / 3
MUCH_ENLARGED = 2.0
"""From where on a crop (share of the area) or an enlargement (factor) is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A picture that will be trained on."""

    path: str
    """Absolute path."""
    relative: str
    """Path from the dataset folder, with forward slashes."""
    width: int
    height: int
    """Size in pixels, upright."""
    bucket: tuple[int, int]
    """Width and height in pixels that it is trained at."""
    caption: str
    content_hash: str
    """sha256 of the file."""


@dataclass(kw_only=True)
class ScanReport:
    """All that a scan found. Paths are relative to the folder."""

    folder: str
    samples: list[Sample] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Pictures that cannot be used, and why."""
    warnings: list[tuple[str, str]] = field(default_factory=list)
    ignored: int = 0
    """Files that are no pictures."""
    uncaptioned: int = 0
    """Usable pictures without a caption of their own."""

    def buckets(self) -> list[tuple[tuple[int, int], int]]:
        """Each bucket (width, height) and how many pictures it has, the fullest first."""
        counts = collections.Counter(s.bucket for s in self.samples)
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

    def as_dict(self) -> dict[str, Any]:
        """The report as ``python -m trainer scan --json`` prints it."""
        return {
            "images": len(self.samples) + len(self.skipped),
            "usable": len(self.samples),
            "ignored": self.ignored,
            "skipped": [{"path": p, "reason": r} for p, r in self.skipped],
            "warnings": [{"path": p, "what": w} for p, w in self.warnings],
            "buckets": [{"width": b[0], "height": b[1], "count": n} for b, n in self.buckets()],
            "captions": {s.relative: s.caption for s in self.samples},
        }


def scan_folder(config: DatasetConfig, progress: Callable[[int, int], None] | None = None) -> ScanReport:
    """Find and decode the pictures of ``config.folder`` and its sub-folders.

    ``progress`` is called with (pictures done, pictures found). Raises ``ValueError`` if there is no such folder, or
    nothing usable in it: one line that says where it looked and for what.
    """
    report = survey(config, progress)
    if not report.samples:
        raise ValueError(nothing_usable(report))
    for what, found in (("skipped", report.skipped), ("warning", report.warnings)):
        for path, reason in found[:10]:
            log.warning("%s: %s %s", what, path, reason)
        if len(found) > 10:
            log.warning("%s: %d more", what, len(found) - 10)
    if report.uncaptioned:
        log.warning("%d of %d pictures have no caption of their own", report.uncaptioned, len(report.samples))
    return report


def nothing_usable(report: ScanReport) -> str:
    """The line that says why a folder cannot be trained on."""
    text = f"dataset folder {report.folder} has no usable picture: looked there and in its sub-folders for PNG, JPEG,"
    text += f" WebP and other pictures, found {report.ignored} other files"
    if report.skipped:
        path, reason = report.skipped[0]
        text += f" and {len(report.skipped)} pictures that cannot be used (the first, {path}, {reason})"
    return text


def survey(config: DatasetConfig, progress: Callable[[int, int], None] | None = None) -> ScanReport:
    """``scan_folder``, but a folder without a usable picture is no error."""
    folder = find_folder(config.folder)
    report = ScanReport(folder=str(folder))
    pictures = []
    for relative in sorted(_files(folder, report), key=natural):
        verdict = _kind(folder, relative)
        if verdict == "picture":
            pictures.append(relative)
        else:
            report.ignored += 1
    seen: dict[str, str] = {}
    started = time.perf_counter()
    with contextlib.closing(ordered_map(_examine, (folder / p for p in pictures))) as outcomes:
        for done, (relative, outcome) in enumerate(zip(pictures, outcomes, strict=True), 1):
            if isinstance(outcome, images.ImageProblem):
                report.skipped.append((shown(relative), outcome.reason))
            else:
                _take(config, folder, relative, outcome, report, seen)
            if progress is not None:
                progress(done, len(pictures))
    report.skipped.sort(key=lambda item: natural(item[0]))
    seconds = max(time.perf_counter() - started, 1e-9)
    log.info("scanned %d pictures in %.1f s (%.0f a second)", len(pictures), seconds, len(pictures) / seconds)
    return report


def _take(config: DatasetConfig, folder: Path, relative: str, found: images.Examined, report: ScanReport,
          seen: dict[str, str]) -> None:  # fmt: skip
    name = shown(relative)
    try:
        bucket = bucket_for(found.width, found.height, config)
    except ValueError as error:
        report.skipped.append((name, str(error)))
        return
    notes = list(found.warnings)
    first = seen.setdefault(found.content_hash, name)
    if first != name:
        notes.append(f"is the same file as {first}: it is trained twice as often")
    share, factor = cropped_share(found.width, found.height, bucket), enlargement(found.width, found.height, bucket)
    if share > MUCH_CROPPED:
        notes.append(f"loses {share:.0%} of its area to the crop to {bucket[0]} x {bucket[1]} px")
    if factor > MUCH_ENLARGED:
        notes.append(f"is {found.width} x {found.height} px and is enlarged {factor:.1f} times")
    caption = caption_for(folder / relative, config.trigger_word)
    report.uncaptioned += caption.source != "file"
    if caption.warning:
        notes.append(caption.warning)
    report.warnings += [(name, note) for note in notes]
    report.samples.append(Sample(
        path=str(folder / relative), relative=name, width=found.width, height=found.height,
        bucket=bucket, caption=caption.text, content_hash=found.content_hash,
    ))  # fmt: skip


def _examine(path: Path) -> images.Examined | images.ImageProblem:
    try:
        return images.examine(path)
    except images.ImageProblem as problem:
        return problem


def _files(folder: Path, report: ScanReport) -> Iterator[str]:
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
            report.skipped.append((shown(here or "."), f"cannot be listed ({error.strerror or error})"))
            continue
        for entry in entries:
            relative = os.path.join(here, entry.name)
            try:
                if entry.is_dir():
                    (linked if entry.is_symlink() else real).append(relative)
                    continue
            except OSError:
                pass
            yield relative


def _kind(folder: Path, relative: str) -> str:
    """``picture`` by name or content (whether it can be used or not), else ``other``."""
    parts = Path(relative).parts
    if any(part.startswith(".") for part in parts) or "__MACOSX" in parts:
        return "other"  # the system's own: thumbnails, AppleDouble files, version control
    extension = os.path.splitext(relative)[1].lower()
    path = folder / relative
    named = extension in images.extensions() | images.RAW_EXTENSIONS | images.OTHER_EXTENSIONS
    try:
        # Asked before opening: to open a pipe is to wait for its writer.
        regular = stat.S_ISREG(os.stat(long_path(path)).st_mode)
    except OSError:
        return "picture" if named else "other"  # a link to nothing: the decoder says so
    if not regular:
        return "other"
    if named:
        return "picture"
    if extension in CAPTION_EXTENSIONS:
        return "other"
    try:
        with open(long_path(path), "rb") as f:
            return "picture" if images.looks_like_picture(f.read(32)) else "other"
    except OSError:
        return "other"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m trainer scan``."""
    parser.add_argument("folder", help="folder of pictures, with captions beside them")
    parser.add_argument("--resolution", type=int, default=1024, help="side in pixels of the square of equal area")
    parser.add_argument("--bucket-step", type=int, default=None, help="bucket sides are multiples of this (default 64)")
    parser.add_argument("--trigger-word", default="", help="caption of pictures that have none")
    parser.add_argument("--no-upscale", action="store_true", help="do not enlarge small pictures")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def main(args: argparse.Namespace) -> int:
    """``python -m trainer scan``. Raises ``ValueError`` if no picture is usable, after printing what was found."""
    # A resolution below the usual step is meant: a finer step then.
    step = args.bucket_step or (64 if args.resolution >= 256 else 16)
    report = survey(DatasetConfig(
        folder=args.folder, resolution=args.resolution, bucket_step=step, trigger_word=args.trigger_word,
        upscale=not args.no_upscale,
    ))  # fmt: skip
    if args.json:
        sys.stdout.write(json.dumps(report.as_dict(), ensure_ascii=True) + "\n")
    else:
        sys.stdout.write(_table(report))
    if not report.samples:
        raise ValueError(nothing_usable(report))
    return 0


def _table(report: ScanReport) -> str:
    lines = [f"{report.folder}: {len(report.samples)} usable pictures, {len(report.skipped)} skipped,"
             f" {report.ignored} other files"]  # fmt: skip
    lines += [f"  {w} x {h} px: {n}" for (w, h), n in report.buckets()]
    lines += [f"  skipped: {path} {reason}" for path, reason in report.skipped]
    lines += [f"  warning: {path} {what}" for path, what in report.warnings]
    return "\n".join(lines) + "\n"

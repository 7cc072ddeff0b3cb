"""What a folder holds to train on, found out before any model loads.

Every picture is decoded wholly, so that a damaged one is named now and not in the middle of a run; every file is
accounted for, as usable, skipped with a reason, or ignored because it is no picture.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import DatasetConfig
from ..progress import count
from . import images, masks
from .buckets import buckets_for, cropped_share, enlargement
from .captions import Caption, called_like, find_caption
from .folders import Listing, list_folder
from .grouped import grouped
from .paths import natural, shown
from .pool import ordered_map
from .report import Sample, ScanReport
from .sets import combine, parts_of
from .tables import Tables

log = logging.getLogger(__name__)

MUCH_CROPPED = 1 / 3
MUCH_ENLARGED = 2.0
"""From where on a crop (share of the area) or an enlargement (factor) is worth a warning."""
Progress = Callable[[int, int], None]
"""Called with (pictures done, pictures found); may raise to cancel."""


def scan_folder(
    config: DatasetConfig,
    progress: Progress | None = None,
    look: Callable[[DatasetConfig, Progress], ScanReport] | None = None,
) -> ScanReport:
    """Find and decode the pictures of a dataset: of its folder, of its sub-folders, and of the folders beside.

    ``look`` stands in for ``survey_folder``. Raises ``ValueError`` if there is no such folder, or nothing usable in
    it: one line that says where it looked and for what.
    """
    report = survey(config, progress, look)
    if problem := why_not(report):
        raise ValueError(problem)
    note("skipped", report.skipped)
    note("warning", report.warnings)
    if report.uncaptioned:
        log.warning("%d of %d pictures have no caption of their own", report.uncaptioned, report.usable)
    return report


def note(what: str, found: Sequence[tuple[str, str]]) -> None:
    """Write what is to be said of files, as (path, what), into the log: the ten things that are said most often."""
    lines = grouped(found)
    for line in lines[:10]:
        log.warning("%s: %s", what, line)
    if len(lines) > 10:
        log.warning("%s: %d things more", what, len(lines) - 10)


def why_not(report: ScanReport) -> str:
    """The line that says why a dataset cannot be trained on; empty: it can."""
    if report.stopped:
        missing = len(report.stopped)
        text = f"{count(missing, 'picture')} in {report.folder} {'has' if missing == 1 else 'have'} no caption"
        text += f" ({report.stopped[0]}{' and others' if missing > 1 else ''}):"
        return f"{text} write what is missing, or choose other missing_captions than 'stop'"
    if report.samples:
        return ""
    text = f"dataset folder {report.folder} has no usable picture: looked there and in its sub-folders for PNG, JPEG,"
    text += f" WebP and other pictures, found {count(report.ignored, 'other file')}"
    if report.masks:
        text += f" ({report.masks} of them masks by their names: all in folders called 'masks', and name.mask.png)"
    if report.skipped:
        path, reason = report.skipped[0]
        text += f" and {count(len(report.skipped), 'picture')} that cannot be used (the first, {path}, {reason})"
    return text


def survey(
    config: DatasetConfig,
    progress: Progress | None = None,
    look: Callable[[DatasetConfig, Progress], ScanReport] | None = None,
) -> ScanReport:
    """``scan_folder``, but a dataset without a usable picture is no error."""
    parts, reports, before = list(parts_of(config)), [], 0
    for part in parts:
        done = 0

        def told(now: int, found: int, before: int = before) -> None:
            nonlocal done
            done = now
            if progress is not None:
                progress(before + now, before + found)

        reports.append((look or survey_folder)(part.config, told))
        before += done
    return combine(parts, reports, lambda: progress(before, before) if progress is not None else None)


def survey_folder(config: DatasetConfig, progress: Progress) -> ScanReport:
    """What one folder holds, whatever else ``config`` names. Raises ``ValueError`` if there is no such folder."""
    started = time.perf_counter()
    listing = list_folder(config.folder)
    report = ScanReport(folder=str(listing.folder), ignored=listing.ignored, masks=len(listing.masks))
    report.skipped += listing.unlisted
    look = _Look(config, listing, report)
    with contextlib.closing(ordered_map(look, listing.pictures)) as outcomes:
        for done, (relative, outcome) in enumerate(zip(listing.pictures, outcomes, strict=True), 1):
            if isinstance(outcome, images.ImageProblem):
                report.skipped.append((shown(relative), outcome.reason))
            else:
                _take(config, listing.folder, relative, outcome, report)
            progress(done, len(listing.pictures))
    report.skipped.sort(key=lambda item: natural(item[0]))
    report.seconds = max(time.perf_counter() - started, 1e-9)
    looked = len(listing.pictures)
    log.info("scanned %d pictures in %.1f s (%.0f a second)", looked, report.seconds, looked / report.seconds)
    return report


@dataclass(frozen=True)
class _Looked:
    found: images.Examined
    caption: Caption
    mask: str


class _Look:
    """Decodes a picture and its mask, and reads its caption; in many threads at once."""

    def __init__(self, config: DatasetConfig, listing: Listing, report: ScanReport) -> None:
        self.config, self.listing, self.tables, self.root = config, listing, Tables(), str(listing.folder)
        self.masks = masks.pair(listing.pictures, listing.masks) if listing.masks else {}
        if config.masks:
            for mask in sorted(set(listing.masks) - set(self.masks.values()), key=natural):
                report.warnings.append((shown(mask), "is a mask by its name, but no picture is called so"))
        if config.fixed_caption.strip() and config.missing_captions != "fixed":
            return
        beside = {os.path.splitext(p)[0] for p in listing.pictures} if listing.tables else set()
        for table in listing.tables:
            if table.lower().endswith(".json") and os.path.splitext(table)[0] in beside:
                continue  # it is the caption of one picture
            self.tables.read(listing.folder, table, lambda path, what: report.warnings.append((path, what)))
        for table, names in self.tables.unused(os.path.join(self.root, p) for p in listing.pictures).items():
            report.warnings.append((table, f"names {count(len(names), 'picture')} not there (the first, {names[0]})"))
        report.warnings += listing.lone_captions()

    def __call__(self, relative: str) -> _Looked | images.ImageProblem:
        path, (head, name) = os.path.join(self.root, relative), os.path.split(relative)
        mask = self.masks.get(relative, "") if self.config.masks else ""
        mask = os.path.join(self.root, mask) if mask else ""
        try:
            found = images.examine(path, self.config, mask or None)
        except images.ImageProblem as problem:
            return problem
        beside = called_like(name, self.listing.captions.get(head, {}))
        caption = find_caption(path, self.config, beside, self.tables.of(path))
        return _Looked(found, caption, mask)


def _take(config: DatasetConfig, folder: Path, relative: str, looked: _Looked, report: ScanReport) -> None:
    name, found, caption = shown(relative), looked.found, looked.caption
    try:
        buckets = buckets_for(found.width, found.height, config)
    except ValueError as error:
        report.skipped.append((name, str(error)))
        return
    if not caption.texts:
        report.skipped.append((name, f"{caption.warning}: pictures without one are left out by choice"))
        if config.missing_captions == "stop":
            report.stopped.append(name)
        return
    notes = list(found.warnings)
    for bucket in buckets:
        share, factor = cropped_share(found.width, found.height, bucket), enlargement(found.width, found.height, bucket)
        if share > MUCH_CROPPED:
            notes.append(f"loses {share:.0%} of its area to the crop to {bucket[0]} x {bucket[1]} px")
        if factor > MUCH_ENLARGED:
            notes.append(f"is {found.width} x {found.height} px and is enlarged {factor:.1f} times")
    if caption.warning:
        notes.append(caption.warning)
    report.warnings += [(name, note) for note in notes]
    path = os.path.join(folder, relative)
    report.samples += [Sample(
        path=path, relative=name, width=found.width, height=found.height, bucket=bucket,
        captions=caption.texts, source=caption.source, content_hash=found.content_hash, thumbnail=found.thumbnail,
        has_alpha=found.has_alpha, mask=looked.mask, mask_hash=found.mask_hash, config=config,
    ) for bucket in buckets]  # fmt: skip

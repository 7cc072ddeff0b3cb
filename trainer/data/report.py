"""What a scan found: the samples to train and to measure, and an account of every other file."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import DatasetConfig
from ..progress import count
from .buckets import Bucket
from .captions import OWN
from .grouped import NAMED, grouped
from .order import batches_per_epoch


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A picture at one of the sizes that it is trained at."""

    path: str
    """Absolute path."""
    relative: str
    """Path from the dataset folder, with forward slashes; of several folders, with what tells them apart before it."""
    width: int
    height: int
    """Size in pixels, upright."""
    bucket: Bucket
    """Width and height in pixels that it is trained at."""
    captions: tuple[str, ...]
    """One of them is trained at a time."""
    source: str
    """Where they are from, as ``captions.Caption`` has it."""
    content_hash: str
    """sha256 of the file."""
    thumbnail: str
    has_alpha: bool
    mask: str
    """Absolute path of its mask; empty: none."""
    mask_hash: str
    config: DatasetConfig
    """The settings of its folder."""

    @property
    def caption(self) -> str:
        """The first of its captions."""
        return self.captions[0]


@dataclass(kw_only=True)
class ScanReport:
    """All that a scan found. Paths are relative to the folder, or told apart as in ``Sample.relative``."""

    folder: str
    """The folder, or several of them behind each other."""
    samples: list[Sample] = field(default_factory=list)
    """What is trained: one for each picture and size."""
    validation: list[Sample] = field(default_factory=list)
    """What is measured and never trained."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Pictures that cannot be used, and why."""
    warnings: list[tuple[str, str]] = field(default_factory=list)
    ignored: int = 0
    """Files that are no pictures to train: captions, masks, others."""
    masks: int = 0
    """Of those, masks."""
    duplicates: int = 0
    """Pictures that are there already, as the same file or the same pixels."""
    stopped: list[str] = field(default_factory=list)
    """Pictures without a caption where that is to stop the training."""
    seconds: float = 0.0
    """What the scan took."""

    def pictures(self) -> list[Sample]:
        """One sample of each picture, those that are measured last."""
        return list({s.relative: s for s in reversed([*self.samples, *self.validation])}.values())[::-1]

    @property
    def usable(self) -> int:
        """Pictures that are trained or measured."""
        return len(self.pictures())

    @property
    def uncaptioned(self) -> int:
        """Usable pictures without a caption of their own."""
        return sum(n for source, n in self.sources().items() if source not in OWN)

    def sources(self) -> dict[str, int]:
        """How many pictures have their caption from where."""
        return dict(collections.Counter(s.source for s in self.pictures()))

    def buckets(self) -> list[tuple[Bucket, int]]:
        """Each bucket (width, height) and how many pictures it has, the fullest first."""
        counts = collections.Counter(s.bucket for s in self.samples)
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))

    def steps_per_epoch(self, batch_size: int) -> int:
        """How many updates see every picture as often as its folder's ``repeats`` say."""
        shapes = [(s.bucket[1] // 8, s.bucket[0] // 8) for s in self.samples]
        return batches_per_epoch(shapes, batch_size, [s.config.repeats for s in self.samples]) if shapes else 0

    def as_dict(self) -> dict[str, Any]:
        """The report as ``python -m trainer scan --json`` prints it."""
        pictures = self.pictures()
        several = {s.relative: list(s.captions) for s in pictures if len(s.captions) > 1}
        measured = list(dict.fromkeys(s.relative for s in self.validation))
        return {
            "images": len(pictures) + len(self.skipped),
            "usable": len(pictures),
            "ignored": self.ignored,
            "skipped": [{"path": p, "reason": r} for p, r in self.skipped],
            "warnings": [{"path": p, "what": w} for p, w in self.warnings],
            "buckets": [{"width": b[0], "height": b[1], "count": n} for b, n in self.buckets()],
            "captions": {s.relative: s.caption for s in pictures},
            "caption_variants": several,
            "caption_sources": self.sources(),
            "masks": self.masks,
            "masked": {s.relative: s.mask for s in pictures if s.mask},
            "duplicates": self.duplicates,
            "validation": measured,
            "seconds": round(self.seconds, 3),
        }


SOURCES = {
    "file": "from files", "table": "from tables", "fixed": "one text for all", "trigger": "the trigger word",
    "name": "words of the file's name", "folder": "the folder's name", "instead": "the fixed caption",
}  # fmt: skip
"""Where captions are from, in words."""


def table(report: ScanReport, batch_size: int | None = None, most: int = 10**9, named: int = NAMED) -> list[str]:
    """Lines that say what a scan found. ``most``: of what is skipped and of warnings, so many things each, with so many
    files of each ``named``.
    """
    trained = len({s.relative for s in report.samples})
    masks = f" ({count(report.masks, 'mask')} among them)" if report.masks else ""
    lines = [f"{report.folder}: {count(trained, 'usable picture')}, {len(report.skipped)} skipped,"
             f" {count(report.ignored, 'other file')}{masks}"]  # fmt: skip
    lines += [f"  {row}" for row in rows(report, batch_size)]
    for word, found in (("skipped", report.skipped), ("warning", report.warnings)):
        told = grouped(found, named)
        lines += [f"  {word}: {line}" for line in told[:most]]
        if len(told) > most:
            lines.append(f"  {word}: {count(len(told) - most, 'thing')} more")
    return lines


def rows(report: ScanReport, batch_size: int | None = None) -> list[str]:
    """What will be trained: by size, by where captions are from, and how many steps an epoch has."""
    lines = [f"{b[0]} x {b[1]} px: {count(n, 'picture')}{_repeats(report.samples, b)}" for b, n in report.buckets()]
    if report.validation:
        lines.append(f"measured, never trained: {count(len({s.relative for s in report.validation}), 'picture')}")
    if told := ", ".join(f"{SOURCES[source]} ({n})" for source, n in report.sources().items()):
        several = len({s.relative for s in report.samples if len(s.captions) > 1})
        lines.append(f"captions: {told}" + (f"; {count(several, 'picture')} with several" if several else ""))
    if batch_size and report.samples:
        seen = sum(s.config.repeats for s in report.samples)
        lines.append(f"an epoch: {count(report.steps_per_epoch(batch_size), 'step')} of up to"
                     f" {count(batch_size, 'picture')}, {seen} in all")  # fmt: skip
    return lines


def _repeats(samples: Sequence[Sample], bucket: Bucket) -> str:
    found = sorted({s.config.repeats for s in samples if s.bucket == bucket})
    return "" if found == [1] else f" (each {' or '.join(map(str, found))} times an epoch)"

"""Several folders as one dataset: told apart, without duplicates on both sides, with a part that is only measured."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence

from ..config import DatasetConfig
from . import images
from .counted import chance
from .paths import find_folder, natural, shown
from .pool import ordered_map
from .report import Sample, ScanReport


@dataclasses.dataclass(frozen=True)
class Part:
    """One folder of a dataset."""

    config: DatasetConfig
    """Its settings; its folder is the only one."""
    share: float
    """Share of its pictures that is measured."""
    measured: bool
    """Whether it is a validation folder, of which nothing is trained."""


def parts_of(config: DatasetConfig) -> Iterator[Part]:
    """The folders of a dataset, each with the settings of its own, validation folders behind what they belong to."""
    alone = dataclasses.replace(config, also=(), validation_folder="", validation_share=0.0)
    yield Part(alone, config.validation_share, False)
    if config.validation_folder.strip():
        yield Part(dataclasses.replace(alone, folder=config.validation_folder, repeats=1, flip=False), 0.0, True)
    for other in config.also:
        yield from parts_of(other)


def combine(parts: Sequence[Part], reports: Sequence[ScanReport], wait: Callable[[], object]) -> ScanReport:
    """One report of the folders' own, told apart by name, split into what is trained and what is measured.

    ``wait`` is called now and then and may raise to cancel.
    """
    labels = tell_apart([part.config.folder for part in parts])
    total = ScanReport(folder=", ".join(dict.fromkeys(r.folder for r in reports)))
    trained: list[tuple[Sample, float]] = []
    for part, report, label in zip(parts, reports, labels, strict=True):
        named = report.samples
        if label:
            named = [dataclasses.replace(s, relative=label + s.relative) for s in named]
        if part.measured:
            total.validation += named
        else:
            trained += [(s, part.share) for s in named]
        total.skipped += [(label + path, why) for path, why in report.skipped]
        total.warnings += [(label + path, what) for path, what in report.warnings]
        total.stopped += [label + path for path in report.stopped]
        total.ignored += report.ignored
        total.masks += report.masks
        total.seconds += report.seconds
    same = _identities([*total.validation, *(s for s, _ in trained)], wait)
    _split(total, trained, same)
    _note_duplicates(total, same)
    return total


def tell_apart(folders: Sequence[str]) -> list[str]:
    """What to put before the paths of each folder: nothing for a single one, else as much of its own as is needed."""
    if len(folders) == 1:
        return [""]
    split = [shown(str(find_folder(f))).strip("/").split("/") for f in folders]
    labels = []
    for i, own in enumerate(split):
        others = [s for j, s in enumerate(split) if j != i and s != own]
        length = next((n for n in range(1, len(own) + 1) if all(s[-n:] != own[-n:] for s in others)), len(own))
        before = sum(s == own for s in split[:i])
        labels.append("/".join(own[-length:]) + (f" ({before + 1})" if before else "") + "/")
    return labels


def _identities(samples: Sequence[Sample], wait: Callable[[], object]) -> dict[str, str]:
    """Content hash -> one that stands for all pictures with the same pixels."""
    by_thumbnail: dict[str, dict[str, str]] = {}
    for s in samples:
        by_thumbnail.setdefault(s.thumbnail, {}).setdefault(s.content_hash, s.path)
    alike = {h: path for group in by_thumbnail.values() if len(group) > 1 for h, path in group.items()}
    same = {s.content_hash: s.content_hash for s in samples}
    by_pixels: dict[str, list[str]] = {}
    for content, pixels in zip(alike, ordered_map(_pixels, alike.values()), strict=True):
        wait()
        by_pixels.setdefault(pixels or content, []).append(content)
    for group in by_pixels.values():
        same.update(dict.fromkeys(group, min(group)))
    return same


def _pixels(path: str) -> str:
    """A hash of what a person sees; empty where the file has changed into something else meanwhile."""
    try:
        picture = images.load_image(path)
    except images.ImageProblem:
        return ""
    return hashlib.sha256(str(picture.size).encode("ascii") + picture.tobytes()).hexdigest()


def _split(total: ScanReport, trained: Sequence[tuple[Sample, float]], same: dict[str, str]) -> None:
    """Measured are the validation folders, and by their content's hash the shares asked for, all copies together."""
    given = {same[s.content_hash]: s.relative for s in total.validation}
    places = {same[s.content_hash]: chance("validation", same[s.content_hash]) for s, _ in trained}
    shares: dict[str, float] = {}
    for s, share in trained:
        identity = same[s.content_hash]
        shares[identity] = max(share, shares.get(identity, 0.0))
    free = sorted((c for c in shares if c not in given), key=lambda c: (places[c], c))
    asked = [c for c in free if shares[c] > 0]
    measured = {c for c in asked if places[c] < shares[c]} or set(asked[:1])
    if measured and len(measured) == len(free):
        measured.discard(free[-1])  # something must be left to train
    told = set()
    for s, _ in trained:
        identity = same[s.content_hash]
        if identity in given:
            if s.relative not in told:
                why = f"is in the validation folder too, as {given[identity]}: measured, not trained"
                total.skipped.append((s.relative, why))
                told.add(s.relative)
        else:
            (total.validation if identity in measured else total.samples).append(s)


def _note_duplicates(total: ScanReport, same: dict[str, str]) -> None:
    first: dict[str, Sample] = {}
    notes: list[tuple[str, str]] = []
    trained = {s.relative: same[s.content_hash] for s in total.samples}
    copies = collections.Counter(trained.values())
    for s in total.pictures():
        known = first.setdefault(same[s.content_hash], s)
        if known is s:
            continue
        total.duplicates += 1
        what = "is the same file as" if known.content_hash == s.content_hash else "has the same pixels as"
        count = copies[same[s.content_hash]]
        times = "twice" if count == 2 else f"{count} times"
        often = f": it is trained {times} as often" if s.relative in trained and count > 1 else ""
        notes.append((s.relative, f"{what} {known.relative}{often}"))
    total.warnings = sorted(notes + total.warnings, key=lambda note: natural(note[0]))



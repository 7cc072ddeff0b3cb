"""A run as the panel wants it: a snapshot to begin with, then what is new since the last look.

Reads the run directory only (its event file, from where it last stopped), so the worker is never disturbed. Everything
here may be called from any thread, and blocks for as long as the disk does.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..trainer.files import PART
from ..trainer.run import RunDirectory

MOST_BINS = 2000
"""Most points of a loss curve that a snapshot holds: about two for each pixel of a wide panel."""
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_KEPT = 500

NOTABLE = ("saved", "save_failed", "checkpoint", "checkpoint_failed", "exported", "out_of_memory", "rolled_back",
           "spike", "lr")
"""Events that a reader is told of as they happened."""
_TOLD = ("n", "type", "step", "error", "seconds", "loss", "usual", "lr", "file", "folder", "updated", "stages", "why")
BACK = ("resumed", "rolled_back")
"""Events after which later steps are of a lost past."""
LOW_DISK = 2e9
"""Bytes below which a disk is low in any case; else it is where another save point would not fit."""
_DISK_SECONDS = 30.0

Bin = list[Any]
"""``[step, mean, low, high, count, lr]``: ``count`` losses of the steps that end at ``step``, whose rate was ``lr``."""


def bins(points: Sequence[tuple[Any, ...]], most: int = MOST_BINS) -> list[Bin]:
    """Merge ``(step, loss, lr)`` points (``lr`` may be left out), in order, into at most ``most`` bins of equally
    many steps."""
    size = max(1, -(-len(points) // most))
    result: list[Bin] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [point[1] for point in part]
        result.append([part[-1][0], sum(values) / len(values), min(values), max(values), len(values), *part[-1][2:]])
    return result


class Follower:
    """One run directory and how far it has been reported."""

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory(path)
        self._uid = self.run.uid
        self._lock = threading.Lock()
        self._reported = 0
        self._step = 0
        self._disk: float | None = None
        self._disk_due = 0.0

    def snapshot(self) -> dict[str, Any]:
        """``status``, ``n`` (number of the last event that it is sure to hold), ``losses`` (bins), ``validation``
        (points), ``samples``.

        The status comes with ``next_save``.
        """
        status = self.run.status()  # first: losses that came since are no harm, missing ones are
        with self.run.log.changed:
            history = self.run.log.history()
            columns = (history.steps.column(name) for name in ("step", "loss", "lr"))
            losses = [point for point in zip(*columns, strict=True) if point[1] is not None]
            validation = [[e["step"], e["loss"]] for e in history.validations if e["loss"] is not None]
        return {"status": {**status, **self.next_save(status["step"])}, "n": status["last_event"],
                "losses": bins(losses), "validation": validation[-MOST_BINS:], "samples": samples(self.run.path)}

    def losses(self, first: int, last: int) -> dict[str, Any]:
        """``losses`` (bins) of the steps from ``first`` to ``last`` alone, and ``n`` as in ``snapshot``."""
        with self.run.log.changed:
            history = self.run.log.history()
            start = bisect.bisect_left(history.steps, first, key=lambda e: e["step"])
            end = bisect.bisect_right(history.steps, last, key=lambda e: e["step"])
            points = [(e["step"], e["loss"], e["lr"]) for e in history.steps[start:end] if e["loss"] is not None]
            return {"losses": bins(points), "n": history.last}

    def next_save(self, step: int) -> dict[str, float | None]:
        """When the worker saves by itself before its target: ``save_in`` (seconds of training), ``save_at`` (step),
        None where never by this: what the worker does (``trainer/live/session.py``)."""
        with self.run.log.changed:
            unsaved = self.run.log.history().save_clock
        recipe = self.run.config.recipe
        minutes, every = recipe.save_every_minutes, recipe.save_every_steps
        return {"save_in": max(0.0, 60 * minutes - unsaved) if minutes > 0 else None,
                "save_at": step - step % every + every if every else None}

    def is_current(self) -> bool:
        """Whether the run is still the one that is followed: not if another was made in its place."""
        return self.run.is_still(self._uid)

    def pulse(self) -> tuple[Any, ...]:
        """Differs from the last one where ``news`` has something to tell; costs next to nothing."""
        info = os.stat(self.run.log.path)
        answers, held = self.run.address_file.exists(), self.run.locked()
        writes = self.run.saving() if answers and held else None
        return info.st_size, info.st_mtime_ns, answers, held, writes, self.disk_low()

    def disk_low(self) -> float | None:
        """Bytes that are free on the run's disk, where that is too little for another save point."""
        now = time.monotonic()
        if now >= self._disk_due:
            self._disk_due = now + _DISK_SECONDS
            free = shutil.disk_usage(self.run.path).free
            point = self.run.latest_save_point()
            needed = sum(f.stat().st_size for f in point.path.rglob("*") if f.is_file()) if point else 0
            self._disk = float(free) if free < max(LOW_DISK, needed) else None
        return self._disk

    def begin(self) -> None:
        """Count everything up to now as reported."""
        with self._lock:
            status = self.run.status()
            self._reported, self._step = status["last_event"], status["step"]

    def news(self) -> dict[str, Any]:
        """The status with ``next_save``, and what happened since the last call.

        ``since`` and ``n``: events since < number <= n are in this. ``losses``: the new ones (bins of one), likewise
        ``validation``; ``happened``: the ``NOTABLE`` ones; ``sampled``: whether there are new pictures. ``reset``
        says that steps were taken back or left out: the reader should take a snapshot instead.
        """
        with self._lock:
            since = self._reported
            reset = sampled = False
            points: list[tuple[int, float, float]] = []
            validation: list[list[float]] = []
            happened: list[dict[str, Any]] = []
            for event in self.run.events(since):
                self._reported = event["n"]
                if event["type"] == "step":
                    self._step = event["step"]
                    if event["loss"] is not None:
                        points.append((event["step"], event["loss"], event["lr"]))
                elif event["type"] == "validated" and event["loss"] is not None:
                    validation.append([event["step"], event["loss"]])
                elif event["type"] in BACK:
                    reset = reset or event["step"] < self._step
                    self._step = event["step"]
                sampled = sampled or event["type"] == "sample"
                if event["type"] in NOTABLE:
                    told = {key: value for key, value in event.items() if key in _TOLD}
                    happened.append(told | {"folder": folder_of(self.run, event)} if "folder" in told else told)
            reset = reset or len(points) > MOST_BINS
            losses = [] if reset else [[step, loss, loss, loss, 1, lr] for step, loss, lr in points]
            about = {"since": since, "n": self._reported, "losses": losses, "reset": reset, "sampled": sampled,
                     "validation": [] if reset else validation, "happened": happened, "disk_low": self.disk_low()}
        status = self.run.status()
        return {**status, **self.next_save(status["step"]), **about}


def folder_of(run: RunDirectory, exported: dict[str, Any]) -> str | None:
    """The whole path of the folder that an exported file lies in; None: not told."""
    return str(run.path / exported["folder"]) if exported.get("folder") else None


def samples(run_dir: Path) -> list[dict[str, Any]]:
    """The pictures in ``samples/``, by step: ``file`` and what its sidecar says (``step``, ``prompt`` ...)."""
    found = []
    folder = run_dir / "samples"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix.lower() in PICTURES and not path.name.startswith(PART):
            try:
                about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                about = {}
            about = about if isinstance(about, dict) else {}
            odd = {name for name in ("step", "index") if type(about.get(name, 0)) is not int}
            found.append({**{key: value for key, value in about.items() if key not in odd}, "file": path.name})
    return sorted(found, key=lambda one: (one.get("step", 0), one.get("index", 0), one["file"]))


def newest_sample(run_dir: Path) -> str | None:
    """The file name of the first picture of the newest step that has one."""
    folder = run_dir / "samples"
    found = os.listdir(folder) if folder.is_dir() else []
    names = [n for n in found if n.lower().endswith(PICTURES) and not n.startswith(PART)]
    steps = [name.partition("_")[0] for name in names]
    return min(name for name, step in zip(names, steps, strict=True) if step == max(steps)) if names else None


def sample_path(run_dir: Path, name: str) -> Path | None:
    """The picture ``name`` of the run, or None where there is none inside its ``samples`` folder."""
    folder = (run_dir / "samples").resolve()
    path = (folder / name).resolve()
    inside = path.parent == folder and path.suffix.lower() in PICTURES
    return path if inside and path.is_file() else None


class Library:
    """The runs of one home folder, with what was read of them kept while it is valid."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: OrderedDict[Path, Follower] = OrderedDict()
        self._statuses: OrderedDict[tuple[Path, int, int], dict[str, Any]] = OrderedDict()

    def follower(self, path: Path) -> Follower:
        """The follower that answers for this run: of its event file only what is new is read again."""
        with self._lock:
            follower = self._followers.get(path)
            if follower is None or not follower.is_current():
                follower = Follower(path)
            self._followers[path] = follower
            self._followers.move_to_end(path)
            while len(self._followers) > _KEPT:
                self._followers.popitem(last=False)
            return follower

    def statuses(self, home: Path) -> list[dict[str, Any]]:
        """The status of each run under ``home``, the last used first. A run that cannot be read is left out."""
        found = []
        for path in home.iterdir() if home.is_dir() else ():
            if path.name.startswith("."):  # a run that is being deleted
                continue
            try:
                info = os.stat(path / "events.jsonl")
                found.append((info.st_mtime_ns, self._status(path, (path, info.st_mtime_ns, info.st_size))))
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                logging.warning("flux_fft: %s is left out of the list of runs: %s", path.name, error)
        return [status for _, status in sorted(found, key=lambda one: one[0], reverse=True)]

    def _status(self, path: Path, key: tuple[Path, int, int]) -> dict[str, Any]:
        with self._lock:
            if key in self._statuses:
                return self._statuses[key]
        status = {**self.follower(path).run.status(), "thumbnail": newest_sample(path)}
        if status["worker"] is None:  # else it changes without a word in the event file, when the worker goes
            with self._lock:
                self._statuses[key] = status
                while len(self._statuses) > _KEPT:
                    self._statuses.popitem(last=False)
        return status

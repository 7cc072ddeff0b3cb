"""What happened to a run, in order: the state machine, the event file, and what can be told from them.

``events.jsonl`` is append-only; each line is one JSON object with ``n`` (1, 2, 3 ...), ``t`` (seconds since 1970),
``type`` and that type's fields:

==============  ==========================================================================================
``state``       ``state``; ``target`` and ``error`` where they belong to it
``target``      ``target``: a run in training was given another one
``step``        ``step``, ``loss``, ``lr``, ``seconds``: one update was made. ``not_finite``: stages whose gradients
                were none, and that were left as they were; ``partial``: ``[n, m]``, it was cut short when n of m
                stages were updated
``eval``        ``step``, ``loss``: the loss over the whole set at fixed noise and timesteps
``saved``       ``step``, ``seconds``: a save point is whole; ``save_failed``: ``step``, ``error``
``resumed``     ``step``: the weights are those of this step; later records are of a lost past
``rolled_back`` ``step``: the same, by the user's will
``planned``     ``plan``: where things live, from now on; ``key``: of the settings and machine that it is for
``out_of_memory``  ``step``, ``plan``, ``key``: the GPU's memory ran out, and a tighter plan is in use from now on.
                ``updated`` of ``stages`` stages had been updated; if any, that step counts as done, and its
                ``step`` follows
``exported``    ``step``, ``file``, ``dtype``;  ``config``: ``changed`` settings;  ``sample``: a picture was kept
==============  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from .files import exclusive

log = logging.getLogger(__name__)

TRANSITIONS: dict[str | None, tuple[str, ...]] = {
    None: ("created",),
    "created": ("preparing",),
    "preparing": ("preparing", "training", "paused", "finished", "stopped", "failed"),
    "training": ("preparing", "paused", "finished", "stopped", "failed"),
    "paused": ("preparing", "training", "stopped", "failed"),
    "finished": ("preparing", "training", "stopped", "failed"),
    "stopped": ("preparing",),
    "failed": ("preparing", "training", "stopped", "failed"),
}
"""The state machine of a run: which state may follow which.

created: described, never opened. preparing: a worker loads it. training: steps are made. paused: in memory, no steps
are made. finished: at its target, saved. stopped: saved, out of memory. failed: see ``error``. Finished, stopped and
failed runs may train again. ``preparing`` follows every state, since a worker may be killed in any.
"""
OPEN_STATES = ("preparing", "training", "paused")
"""States that only a living worker can be in. Where none lives the run was ``interrupted``."""
WINDOW = 20
"""Steps over which the seconds per step are taken (their median: a save or a pause does not tilt it)."""


class History:
    """What the events say so far: state, step, target, loss curve. Records of a lost past are dropped."""

    def __init__(self) -> None:
        self.last = 0
        self.state: str | None = None
        self.step = 0
        self.target: int | None = None
        self.error: str | None = None
        self.steps: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event in."""
        self.last = max(self.last, event["n"])
        kind = event["type"]
        if kind == "state":
            self.state = event["state"]
            self.error = event.get("error")
            self.target = event.get("target", self.target)
        elif kind == "target":
            self.target = event["target"]
        elif kind == "step":
            self.step = event["step"]
            self.steps.append(event)
        elif kind == "eval":
            self.evals.append(event)
        elif kind in ("resumed", "rolled_back"):
            self.step = event["step"]
            self.steps = [e for e in self.steps if e["step"] <= self.step]
            self.evals = [e for e in self.evals if e["step"] <= self.step]

    def summary(self) -> dict[str, Any]:
        """The numbers that a panel shows, as plain JSON types; None where there is none yet."""
        recent = [e["seconds"] for e in self.steps[-WINDOW:] if "seconds" in e]
        seconds = statistics.median(recent) if recent else None
        to_go = max(0, self.target - self.step) if self.target is not None else None
        return {
            "state": self.state,
            "step": self.step,
            "target": self.target,
            "loss": self.steps[-1]["loss"] if self.steps else None,
            "lr": self.steps[-1]["lr"] if self.steps else None,
            "seconds_per_step": seconds,
            "error": self.error,
            "loss_first": self.steps[0]["loss"] if self.steps else None,
            "eval_loss": self.evals[-1]["loss"] if self.evals else None,
            "eval_loss_first": self.evals[0]["loss"] if self.evals else None,
            "seconds_left": to_go * seconds if seconds is not None and to_go is not None else None,
            "last_event": self.last,
        }


class EventLog:
    """The event file of one run. Threads and processes may append and read at once.

    A line that a crash or a full disk cut short was never an event: readers leave it out, the next append takes its
    place. Lines that are no JSON (a disk that lost a block) are passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed = threading.Condition(threading.RLock())
        self.patient = False
        """Whether an event that cannot be written (the disk is full) waits for the next one instead of raising: set by
        the worker, whose training is worth more than its diary."""
        self._waiting: list[dict[str, Any]] = []
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._events: list[dict[str, Any]] = []
        self._history = History()

    def append(self, kind: str, *, durable: bool = False, **fields: Any) -> dict[str, Any]:
        """Add one event and return it. ``durable``: on the disk before this returns, should the power fail.

        Numbers that JSON has no word for (NaN, infinity) become None. An event that has to wait counts in the history
        at once, but has no number (0) and is not among ``events`` until it is written: another process may take the
        number that it would have had.
        """
        with self.changed, open(self.path, "a+b", buffering=0) as file, exclusive(file, 10.0) as got:
            if not got:
                raise OSError(f"{self.path} is held by another process")
            self._catch_up(file)
            file.truncate(self._offset)
            event = {"n": 0, "t": round(time.time(), 3), "type": kind, **_clean(fields)}
            due = [*self._waiting, event]
            numbered = [{**e, "n": n} for n, e in enumerate(due, self._history.last + 1)]
            data = b"".join(json.dumps(e, allow_nan=False).encode() + b"\n" for e in numbered)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                if durable:
                    os.fsync(file.fileno())
            except OSError as error:
                file.truncate(self._offset)
                if not self.patient:
                    raise
                log.warning("%s cannot be written (%s): its events wait in memory", self.path.name, error.strerror)
                self._waiting.append(event)
                self._history.apply(event)
            else:
                self._offset += len(data)
                self._waiting.clear()
                for known, with_number in zip(due, numbered, strict=True):
                    known["n"] = with_number["n"]
                self._history.last = event["n"]
                self._events += due
                self._history.apply(event)
            self.changed.notify_all()
            return event

    def events(self, since: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Events numbered above ``since``, oldest first, at most ``limit``."""
        with self.changed:
            self.refresh()
            # Numbers rise, by one unless a line was lost: few steps from the end find the first wanted.
            start = len(self._events)
            while start and self._events[start - 1]["n"] > since:
                start -= 1
            return self._events[start:] if limit is None else self._events[start : start + limit]

    def history(self) -> History:
        """What the events say as of now. Read it under ``changed``, or in one go."""
        with self.changed:
            self.refresh()
            return self._history

    def refresh(self) -> None:
        """Take in what other processes have appended."""
        with self.changed:
            try:
                with open(self.path, "rb") as file:
                    self._catch_up(file)
            except FileNotFoundError:
                self._clear()

    def _catch_up(self, file: Any) -> None:
        size = os.fstat(file.fileno()).st_size
        if size < self._offset:  # another file lies there now
            self._clear()
        if size == self._offset:
            return
        file.seek(self._offset)
        data = file.read(size - self._offset)
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            # Bytes that are no event of ours (a disk lost a block): the rest of the history still counts.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._take(json.loads(line))
        self._offset += whole

    def _take(self, event: dict[str, Any]) -> None:
        self._history.apply(event)
        self._events.append(event)


def _clean(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value

"""What happened to a run, in order: the state machine, the event file, and what can be told from them.

``events.jsonl`` is append-only; each line is one JSON object with ``n`` (1, 2, 3 ...), ``t`` (seconds since 1970),
``type`` and that type's fields:

==============  ==========================================================================================
``state``       ``state``; ``target`` and ``error`` where they belong to it; ``on_the_way``: it pauses at that step
                because a client asked for that before it reaches its target
``target``      ``target``: a run in training was given another one
``step``        ``step``, ``loss``, ``lr``, ``seconds``: one update was made. ``images``, ``epoch``: seen so far.
                ``not_finite``: stages whose gradients were none, and that were left as they were; ``partial``:
                ``[n, m]``, it was cut short when n of m stages were updated
``spike``       ``step``, ``loss``, ``usual``: that step's loss is far above those before it
``bad_numbers``  ``step``, ``batch``, ``error``: the loss of that batch, or its gradients, were no numbers; the run
                stops, or goes back
``eval``        ``step``, ``loss``: the loss over the whole set at fixed noise and timesteps
``validated``   ``step``, ``loss``: the same over the pictures that are never trained
``saved``       ``step``, ``seconds``: a save point is whole; ``save_failed``: ``step``, ``error``
``checkpoint``  ``step``, ``file``: a weights-only checkpoint is whole; ``checkpoint_failed``: ``step``, ``error``
``damaged``     ``step``, ``error``: what was saved then is not as it was written, and is not looked at any more
``resumed``     ``step``: the weights are those of this step; later records are of a lost past. A run that had finished
                at a later one is paused. ``fresh``: and the moments of the optimizer begin anew
``rolled_back`` ``step``, ``fresh``: the same, by the user's will or, with ``why``, by the run's own rules; one that had
                failed is paused. ``skipped``: the number of the batch that is left out from now on
``lr``          ``step``, ``lr``: the learning rate after this step, until the settings name another one
``memory``      ``vram_gb``, ``ram_gb``, ``waits``: in use while training, and what steps wait for; or in use when the
                VRAM was given back, with ``idle_exit``: after so many seconds at rest the worker saves and goes
``planned``     ``plan``: where things live, from now on; ``key``: of the settings and machine that it is for
``out_of_memory``  ``step``, ``plan``, ``key``: the GPU's memory ran out, and a tighter plan is in use from now on.
                ``updated`` of ``stages`` stages had been updated; if any, that step counts as done, and its
                ``step`` follows
``exported``    ``step``, ``file``, ``folder`` that it lies in (relative to the run, if within it), ``dtype``
``config``      ``changed`` settings;  ``sample``: a picture was kept
==============  ==========================================================================================
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import os
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import files
from .files import exclusive
from .history import History

log = logging.getLogger(__name__)

TRANSITIONS: dict[str | None, tuple[str, ...]] = {
    None: ("created",),
    "created": ("preparing",),
    "preparing": ("preparing", "training", "paused", "finished", "stopped", "failed"),
    "training": ("preparing", "paused", "finished", "stopped", "failed"),
    "paused": ("preparing", "training", "paused", "stopped", "failed"),
    "finished": ("preparing", "training", "stopped", "failed"),
    "stopped": ("preparing",),
    "failed": ("preparing", "training", "stopped", "failed"),
}
"""The state machine of a run: which state may follow which.

Besides, ``resumed`` and ``rolled_back`` take a run that has finished or failed to ``paused``, as listed above.
created: described, never opened. preparing: a worker loads it. training: steps are made. paused: in memory, no steps
are made. finished: at its target, saved. stopped: saved, out of memory. failed: see ``error``. Finished, stopped and
failed runs may train again. ``preparing`` follows every state, since a worker may be killed in any.
"""
CHUNK = 1 << 18
"""Bytes of the event file that are read at once."""
OPEN_STATES = ("preparing", "training", "paused")
"""States that only a living worker can be in. Where none lives the run was ``interrupted``."""


class EventLog:
    """The event file of one run. Threads and processes may append and read at once.

    A line that a crash or a full disk cut short was never an event: readers leave it out, the next append takes its
    place. Lines that are no JSON (a disk that lost a block) are passed over. In memory is only where each event lies
    in the file (18 bytes), and what ``History`` keeps of it: runs of a hundred thousand steps are usual.
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
        self._numbers, self._starts, self._kinds = array("q"), array("q"), array("H")
        """Of each event: its ``n``, where its line begins, which of the types known so far it is."""
        self._types: dict[str, int] = {}
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
            lines = [json.dumps(e, allow_nan=False).encode() + b"\n" for e in numbered]
            try:
                files.write(file, b"".join(lines))
                if durable:
                    files.sync(file)
            except OSError as error:
                file.truncate(self._offset)
                if not self.patient:
                    raise
                log.warning("%s cannot be written (%s): its events wait in memory", self.path.name, error.strerror)
                self._waiting.append(event)
                self._history.apply(event)
            else:
                self._waiting.clear()
                for known, with_number, line in zip(due, numbered, lines, strict=True):
                    known["n"] = with_number["n"]
                    self._note(known)
                    self._offset += len(line)
                self._history.last = event["n"]
                self._history.apply(event)
            self.changed.notify_all()
            return event

    def events(self, since: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Events numbered above ``since``, oldest first, at most ``limit``."""
        with self.changed:
            self.refresh()
            start = bisect.bisect_right(self._numbers, since)  # numbers rise, by one unless a line was lost
            stop = len(self._numbers)
            return self._read(range(start, stop if limit is None else min(stop, start + limit)))

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of some types, oldest first."""
        with self.changed:
            self.refresh()
            wanted = {self._types.get(kind) for kind in kinds}
            return self._read([i for i, kind in enumerate(self._kinds) if kind in wanted])

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
        rest = b""
        while read := file.read(min(CHUNK, size - self._offset - len(rest))):
            *lines, rest = (rest + read).split(b"\n")
            for line, event in zip(lines, _parsed(lines), strict=True):
                try:
                    self._history.apply(event)
                    self._note(event)
                except (ValueError, LookupError, TypeError, OverflowError):
                    pass  # bytes that are no event of ours: the rest of the history still counts
                self._offset += len(line) + 1

    def _note(self, event: dict[str, Any]) -> None:
        """Note that the line of ``event`` begins at the offset."""
        n, kind = event["n"], event["type"]
        if kind not in self._types:
            self._types[kind] = len(self._types)
        self._numbers.append(n)
        self._starts.append(self._offset)
        self._kinds.append(self._types[kind])

    def _read(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """The events of these places among all."""
        found: list[dict[str, Any]] = []
        if not places:
            return found
        try:
            with open(self.path, "rb") as file:
                for first in range(0, len(places), 1000):
                    found += filter(None, _parsed([self._line(file, i) for i in places[first : first + 1000]]))
        except FileNotFoundError:  # deleted since it was looked at
            pass
        return found

    def _line(self, file: Any, place: int) -> bytes:
        file.seek(self._starts[place])
        return file.readline()


def _parsed(lines: Sequence[bytes]) -> Iterable[Any]:
    """What the lines say; None for one that is no JSON. All at once, which takes a fraction of the time, if it can be.
    """
    try:
        found = json.loads(b"[[" + b"],[".join(lines) + b"]]")
        if lines and [len(one) for one in found] == [1] * len(lines):
            return [one[0] for one in found]
    except (ValueError, TypeError, RecursionError):
        pass
    return [_parsed_alone(line) for line in lines]


def _parsed_alone(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _clean(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value

"""Tells the browsers what the runs of this server do, while they do it.

A node that trains says so with ``watching``; from then, as long as the run's worker lives, ``flux_fft.event`` goes out
on each change, at most every half second. A parked worker is looked at less often, and as long as nothing changes
nothing is sent. A single thread does it, and only while there is something to watch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .follow import Follower

EVENT = "flux_fft.event"
INTERVAL = 0.5
"""Seconds between two looks at a run that is held by a node or moves."""
REST = 1.0
"""Seconds between two looks at a run that rests in a living worker, which will save and leave some time."""
BEAT = 5.0
"""Seconds after which a moving run is reported though nothing changed, so that a reader knows that it is watched."""
MOVING = ("preparing", "training")
_MOST_PLACES = 500

Send = Callable[[str, dict[str, Any]], None]


class _Watch:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.follower: Follower | None = None
        self.holders = 0
        self.note = ""
        self.pulse: tuple[Any, ...] | None = None
        self.was: tuple[bool, bool] = (False, False)
        """Whether the run moved, and whether its worker lived, at ``pulse``."""
        self.last_seen: tuple[Any, ...] | None = None
        self.sent_at = 0.0
        self.due = 0.0


class Pusher:
    """Watches runs and sends their events with ``send(event, data)``."""

    def __init__(self, send: Send, interval: float = INTERVAL) -> None:
        self._send = send
        self._interval = interval
        self._lock = threading.Lock()
        self._watches: dict[Path, _Watch] = {}
        self._places: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()

    @contextlib.contextmanager
    def watching(self, run_dir: Path, node_id: str | None = None, workflow_id: str = "") -> Iterator[None]:
        """Send the run's events while the body runs, and after it until the run rests."""
        self.watch(run_dir, node_id, workflow_id)
        try:
            yield
        finally:
            self.unwatch(run_dir)

    def watch(self, run_dir: Path, node_id: str | None = None, workflow_id: str = "") -> None:
        """Begin to send a run's events; ``node_id`` (of ``workflow_id``) is where the graph trains it."""
        self.note(run_dir, node_id, workflow_id)
        self._hold(run_dir, 1)

    def unwatch(self, run_dir: Path) -> None:
        """Undo one ``watch``. The run is followed on until its worker has gone."""
        self._hold(run_dir, -1)

    def follow(self, run_dir: Path) -> None:
        """Send the events of a run that somebody looks at, as long as its worker lives."""
        self._hold(run_dir, 0)

    def _hold(self, run_dir: Path, more: int) -> None:
        path = Path(run_dir)
        with self._lock:
            watch = self._watches.setdefault(path, _Watch(path))
            watch.holders = max(0, watch.holders + more)
            if watch.holders == 0:
                watch.note = ""
            watch.due = 0.0
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="flux_fft_pusher", daemon=True)
                self._thread.start()
            self._woken.set()

    def note(self, run_dir: Path, node_id: str | None, workflow_id: str = "") -> None:
        """Remember that this node of this workflow shows this run, without watching it."""
        if node_id is None:
            return
        with self._lock:
            key = (str(workflow_id or ""), str(node_id))
            self._places[key] = Path(run_dir).name
            self._places.move_to_end(key)
            while len(self._places) > _MOST_PLACES:
                self._places.popitem(last=False)

    def say(self, run_dir: Path, text: str) -> None:
        """One line on what a watched run waits for; "" takes it back."""
        with self._lock:
            watch = self._watches.get(Path(run_dir))
            if watch is not None:
                watch.note = text

    def about(self, run_dir: Path) -> dict[str, Any]:
        """``note`` (see ``say``) and ``held``: whether a node waits for the run."""
        with self._lock:
            watch = self._watches.get(Path(run_dir))
            return {"note": watch.note if watch else "", "held": watch is not None and watch.holders > 0}

    def places(self, run: str | None = None) -> list[dict[str, str]]:
        """Where runs are shown: ``run``, ``node_id``, ``workflow_id``."""
        with self._lock:
            known = list(self._places.items())
        return [
            {"run": name, "workflow_id": workflow, "node_id": node}
            for (workflow, node), name in known
            if run is None or run == name
        ]

    def _loop(self) -> None:
        while True:
            self._woken.clear()
            with self._lock:
                if not self._watches:
                    self._thread = None
                    return
                watches = list(self._watches.values())
            now = time.monotonic()
            for watch in watches:
                if watch.due <= now:
                    self._look_safely(watch)
            with self._lock:
                due = min((watch.due for watch in self._watches.values()), default=0.0)
            pause = due - time.monotonic()
            if pause > self._interval:
                self._woken.wait(pause)  # something new to watch need not wait for what rests
            elif pause > 0:
                time.sleep(pause)

    def _look_safely(self, watch: _Watch) -> None:
        held = watch.holders > 0  # read before the run, so that its last change under a node is never missed
        moving = alive = False
        try:
            moving, alive = self._look(watch)
        except Exception:
            # A directory that is not there yet, or is being moved or deleted, must not end the others' events.
            logging.debug("flux_fft: no event of %s", watch.path.name, exc_info=True)
        with self._lock:
            watch.due = time.monotonic() + (self._interval if held or moving else REST)
            if not held and not alive and watch.holders == 0:
                self._watches.pop(watch.path, None)

    def _look(self, watch: _Watch) -> tuple[bool, bool]:
        """Send what is new. Returns whether the run moves, and whether its worker lives."""
        if watch.follower is None:
            watch.follower = Follower(watch.path)
            watch.follower.begin()
        about = self.about(watch.path)
        pulse = (*watch.follower.pulse(), about)
        now = time.monotonic()
        if pulse == watch.pulse and not (watch.was[0] and now - watch.sent_at > BEAT):
            return watch.was
        if not watch.follower.is_current():  # another run was made in its place
            watch.follower = Follower(watch.path)
        news = watch.follower.news()
        moving = news["state"] in MOVING or news["saving"] is not None
        seen = (news["n"], news["state"], news["worker"], news["error"], news["disk_low"], news["saving"], about)
        if seen != watch.last_seen or (moving and now - watch.sent_at > BEAT):
            self._send(EVENT, {**news, **about, "places": self.places(watch.path.name)})
            watch.last_seen, watch.sent_at = seen, now  # if that fails, it is told again
        watch.pulse, watch.was = pulse, (moving, news["worker"] is not None)
        return watch.was

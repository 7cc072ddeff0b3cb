"""What is asked of a worker, from any thread: its goal, and work for the one thread that has the engine."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..protocol import WorkerClosing
from ..run import RunDirectory
from .jobs import Jobs
from .session import Session

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_EVENTS = 2000
"""Events in one answer to ``status``; whoever wants more asks again."""


class Asked:
    """The side of a worker that others see. ``until``: a first target; ``save_every``, ``watch``: see ``Session``."""

    def __init__(self, run: RunDirectory, *, until: int | None = None, save_every: int | None = None,
                 watch: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.run = run
        self.quitting = ""
        """Why it is about to exit; empty while it is not."""
        self.failure: Exception | None = None
        """Why the run could not be loaded; requests are answered with it."""
        self._session = Session(run, save_every=save_every, watch=watch)
        self._jobs = Jobs()
        self._lock = threading.RLock()  # of goal and state: held for moments, never during a step
        self._goal, self._new_goal = until, False
        self._pauses: set[int] = set()
        """Steps on the way at which it pauses, for pictures. Those of several clients stand side by side."""
        self._closing = 0  # saves under way to exit after: no goal is taken meanwhile

    def status(self, since: int = 0, wait: float = 0.0) -> dict[str, Any]:
        """The run's status and its events after ``since``; waits up to ``wait`` seconds for one."""
        deadline = time.monotonic() + wait
        with self.run.log.changed:
            while self.run.log.history().last <= since and not self._jobs.closed:
                if (left := deadline - time.monotonic()) <= 0:
                    break
                # Others append too (pictures, settings), and only a look at the file tells.
                self.run.log.changed.wait(min(left, 0.5))
        return {**self.run.status(), "worker": self._session.activity, "exporting": self._session.exporting,
                "events": self.run.events(since, MAX_EVENTS)}

    def train(self, until: int, pause_at: int | None = None) -> None:
        """Set the target and return. Nothing happens where the run is there already.

        ``pause_at``: the run pauses at that step on the way (or stays paused, if there already), in memory and
        unsaved, for a picture to be sampled.
        """
        for name, value in (("until", until), ("pause_at", pause_at)):
            if not (type(value) is int and value >= 1) and (name, value) != ("pause_at", None):
                raise ValueError(f"{name} is {value!r}: give a step, a whole number above 0")
        with self._lock:
            self._refuse_if_useless()
            if self._closing:
                raise WorkerClosing("the worker is saving, to exit")
            trainer, state = self._session.trainer, self._session.state
            if trainer is not None:
                if until < trainer.step or (until == trainer.step and state == "finished"):
                    return
                if pause_at is not None and pause_at <= trainer.step and state != "training":
                    if pause_at == trainer.step:
                        self._rest_on_the_way(pause_at, until)
                    return
                if state != "training":
                    self._session.transition("training", target=until)
                elif self._goal != until:
                    self._session.event("target", target=until)
            if pause_at is not None:
                self._pauses.add(pause_at)
            self._goal, self._new_goal = until, True
        self._jobs.wake()

    def pause(self, wait: bool = True) -> None:
        """Stop within one step and give back the VRAM; nothing is written. ``wait``: until that is so."""
        self._give_up_goal()
        if wait:
            self._jobs.call(self._pause)
        else:
            threading.Thread(target=self._pause_later, daemon=True).start()

    def park(self) -> None:
        """Give back the VRAM of a run that rests; where it stands, and what it is to do, stay as they are."""
        self._jobs.call(self._park)

    def stop(self) -> None:
        """Stop within one step, save and exit; returns when it is saved. If that fails the worker lives on."""
        with self._lock:
            self._closing += 1
            self._give_up_goal()
        try:
            self._jobs.call(self._stop)
        except BaseException:
            with self._lock:
                self._closing -= 1
            raise

    @property
    def closing(self) -> bool:
        """Whether it is about to exit, or saving in order to."""
        return bool(self.quitting or self._closing)

    def quit(self, why: str) -> None:
        """Stop within one step, save and exit, whatever happens; returns at once."""
        self.quitting = self.quitting or why
        self._jobs.wake()

    def do(self, work: Callable[[Session], T]) -> T:
        """Have ``work`` done with the engine between two steps, and return what it returns."""

        def checked() -> T:
            self._refuse_if_useless()
            return work(self._session)

        return self._jobs.call(checked)

    def roll_back(self, step: int | None, fresh: bool) -> int:
        """Stop within one step and go back to the save point or checkpoint of ``step``; returns its step."""
        self.run.find_source(step, fresh=fresh)  # what cannot be stops no training
        self._give_up_goal()

        def back(session: Session) -> int:
            self._halt()
            return session.roll_back(step, fresh=fresh)

        return self.do(back)

    def _rest_on_the_way(self, step: int, target: int) -> None:
        """Stay at ``step`` for pictures, on the way to ``target``: who pauses it now means something by it."""
        now = self.run.log.history()
        if step >= target or now.on_the_way is not None:
            return
        if now.state in ("finished", "failed"):
            self._session.transition("training", target=target)
        self._session.transition("paused", on_the_way=step, target=target)

    def _give_up_goal(self) -> None:
        with self._lock:
            self._goal = None
            self._pauses.clear()

    def _refuse_if_useless(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.quitting:
            raise WorkerClosing("the worker is saving, to exit")

    # -- done by the thread that has the engine

    def _halt(self) -> None:
        with self._lock:
            self._give_up_goal()
            now = self.run.log.history()
            # One that rests on its way goes on by itself, which is not wanted any more.
            if now.state == "training" or (now.state == "paused" and now.on_the_way is not None):
                self._session.transition("paused")

    def _park(self) -> None:
        if self._goal is None:
            self._session.park()

    def _pause(self) -> None:
        with self._lock:
            if self._goal is not None:  # asked to go on before this was looked at
                return
            self._halt()
        self._session.park()

    def _pause_later(self) -> None:
        with contextlib.suppress(WorkerClosing):
            self._jobs.call(self._pause)

    def _stop(self) -> None:
        self._halt()
        self._session.save()
        self.quitting = "stopped by request"

"""The worker: one process, one run, trained until told otherwise.

The main thread makes a step, then looks for what is asked of it: predictions, evaluations, saves and exports are done
there, between two steps, so that they see whole steps only. Training is nothing but a goal: while there is one, steps
are made. The methods without underscore may be called from any thread; ``service.py`` lets clients call them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import files
from .events import OPEN_STATES
from .jobs import Jobs
from .launch import ENDED, EXIT_FAILED, STARTED, idle_seconds
from .protocol import VERSION, Server, WorkerClosing
from .run import RunDirectory
from .service import Service
from .session import Session
from .signals import caught_signals

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_EVENTS = 2000
"""Events in one answer to ``status``; whoever wants more asks again."""


class _Abandoned(BaseException):
    """A signal arrived while the run was being loaded, when there is nothing to save."""


class Worker:
    """Serves one run.

    ``idle_park``, ``idle_exit``: seconds without work after which it gives back its VRAM, and saves and exits (None: as
    the environment says).
    ``foreground``: it serves a person at a terminal, so it ends at its target and lives on when ComfyUI goes away.
    ``until``: a first target. ``save_every``, ``watch``: see ``Session``.
    """

    def __init__(self, run: RunDirectory, *, idle_park: float = 10.0, idle_exit: float | None = None,
                 save_every: int | None = None, foreground: bool = False, until: int | None = None,
                 watch: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.run = run
        self.idle_park, self.foreground = idle_park, foreground
        self.idle_exit = idle_seconds() if idle_exit is None else idle_exit
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
        self._idle_since = time.monotonic()
        self._exit_code = 0
        self._was_finished = False

    def serve(self) -> int:
        """Open the run, work, and return the exit code. ``RunLocked`` if another process has it open."""
        with self.run.lock():
            log.info(STARTED)
            self._begin()  # before anyone can ask, for what the events say now was true of another worker
            service = Service(self)
            server = Server(service.handle, service.lost)
            try:
                address = {"version": VERSION, "port": server.port, "key": server.key.hex(), "pid": os.getpid()}
                files.write_json(self.run.address_file, address, mode=0o600)
                with caught_signals(self._note_signal):
                    self._load()
                    self._work()
                    self._leave()
            finally:
                self._jobs.close()
                with self.run.log.changed:
                    self.run.log.changed.notify_all()
                server.close(5.0)
                if not self._session.gone:
                    self.run.address_file.unlink(missing_ok=True)
            log.info(ENDED)
        return self._exit_code

    # -- for any thread

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

    def _give_up_goal(self) -> None:
        with self._lock:
            self._goal = None
            self._pauses.clear()

    def _refuse_if_useless(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.quitting:
            raise WorkerClosing("the worker is saving, to exit")

    # -- the main thread

    def _begin(self) -> None:
        states = [e["state"] for e in self.run.events() if e["type"] == "state" and e["state"] != "preparing"]
        point = self.run.latest_save_point()
        whole = point is not None and point.step == self.run.log.history().step
        self._was_finished = whole and states[-1:] == ["finished"]
        self._session.begin()

    def _load(self) -> None:
        session = self._session
        try:
            trainer = session.load()
        except _Abandoned:
            return
        except Exception as error:
            session.activity = "idle"
            self.failure = error
            session.fail(error)
            return
        with self._lock:
            session.use(trainer)
            if self._goal is not None and self._goal < trainer.step:
                self._goal = None
            if self._goal is not None:
                session.transition("training", target=self._goal)
            else:
                session.transition("finished" if self._was_finished else "paused")
        self._idle_since = time.monotonic()

    def _work(self) -> None:
        while not self.quitting:
            if self._session.gone:
                self._exit_code, self.quitting = EXIT_FAILED, "the run's folder was deleted or moved"
                return
            training = self._goal is not None and self.failure is None
            # Short waits: Windows delivers Ctrl-C only between them.
            job = self._jobs.next(0 if training else min(0.5, self.idle_park / 2, self.idle_exit / 2))
            if job is not None:
                job.run()
            elif self._goal is None or self.failure is not None:
                self._rest()
                continue
            elif not self.quitting:
                self._advance()
            self._session.activity = "idle"
            self._idle_since = time.monotonic()

    def _rest(self) -> None:
        idle = time.monotonic() - self._idle_since
        if self.failure is not None:
            # Time for the clients that wait for it to be told.
            if idle > 2.0 or self.foreground:
                self._exit_code, self.quitting = EXIT_FAILED, "the run could not be loaded"
        elif self.foreground and self._session.state in ("finished", "failed"):
            with self._lock:
                if self._goal is None:  # nobody has asked for more meanwhile
                    self._exit_code = 0 if self._session.state == "finished" else EXIT_FAILED
                    self.quitting = "done"
        elif idle > self.idle_exit:
            self._exit_idle()
        elif idle > self.idle_park:
            self._session.park()

    def _exit_idle(self) -> None:
        self._idle_since = time.monotonic()
        with self._lock:
            if self._goal is not None:
                return
            self._closing += 1
        if self._session.try_save():
            self.quitting = f"idle for {self.idle_exit:g} s"
        with self._lock:
            self._closing -= 1

    def _advance(self) -> None:
        """One step towards the goal, and what there is to do when it is reached."""
        session = self._session
        try:
            if self._new_goal:
                self._new_goal = False
                self._take_new_settings()
            goal, trainer = self._goal, session.trainer
            if goal is None or trainer is None:
                return
            if trainer.step == 0:
                session.evaluate_once()
                session.validate_once()
            step = session.step() if trainer.step < goal else trainer.step
            with self._lock:  # both at one moment: whoever pauses takes both back
                goal, due = self._goal, {at for at in self._pauses if at <= step}
            if goal is None or self.quitting:
                return
            if step >= goal:
                self._reach(goal)
            elif due:
                self._pause_on_the_way(due, step)
        except Exception as error:
            self._training_failed(error)

    def _take_new_settings(self) -> None:
        if self._session.described_anew and not self._session.take_description():
            log.info("the run's settings have changed: it is loaded again")
            self._session.save()
            self._session.drop()
            self._begin()
            self._load()

    def _reach(self, goal: int) -> None:
        self._session.save()
        self._session.evaluate_once()
        self._session.validate_once()
        with self._lock:
            if self._goal == goal:  # nobody has asked for more meanwhile, or to pause
                self._give_up_goal()
                self._session.transition("finished")

    def _pause_on_the_way(self, due: set[int], step: int) -> None:
        with self._lock:
            if self._goal is not None and due <= self._pauses:  # nobody has paused it meanwhile
                self._pauses -= due
                self._goal = None
                self._session.transition("paused", on_the_way=step)

    def _halt(self) -> None:
        with self._lock:
            self._give_up_goal()
            if self._session.state == "training":
                self._session.transition("paused")

    def _training_failed(self, error: Exception) -> None:
        """A user's error leaves whole weights and a worker that answers; anything else ends it, and says why."""
        trainer = self._session.trainer
        with self._lock:
            self._give_up_goal()
            self._session.fail(error)
            if not isinstance(error, ValueError) or trainer is None or trainer.torn:
                self._exit_code, self.quitting = EXIT_FAILED, "training failed"

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

    def _leave(self) -> None:
        log.info("exiting: %s", self.quitting)
        if self._session.gone:
            return
        try:
            self._session.save()
            with self._lock:
                if self._session.state in OPEN_STATES:
                    self._session.transition("stopped")
        except Exception as error:
            self._session.fail(error)
            self._exit_code = EXIT_FAILED

    def _note_signal(self, name: str) -> None:
        self.quit(name)
        if self._session.activity == "loading":
            raise _Abandoned

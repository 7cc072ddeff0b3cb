"""The worker: one process, one run, trained until told otherwise.

The main thread makes a step, then looks for what is asked of it: predictions, evaluations, saves and exports are done
there, between two steps, so that they see whole steps only. Training is nothing but a goal: while there is one, steps
are made. What others may ask of it, from any thread, is in ``asked.py``; ``service.py`` lets clients do so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from . import files
from .events import OPEN_STATES
from .launch import ENDED, EXIT_FAILED, STARTED, idle_seconds
from .live.asked import Asked
from .live.service import Service
from .live.signals import caught_signals
from .protocol import ON_THE_WAY, VERSION, Server
from .run import RunDirectory

log = logging.getLogger(__name__)


class _Abandoned(BaseException):
    """A signal arrived while the run was being loaded, when there is nothing to save."""


class Worker(Asked):
    """Serves one run.

    ``idle_park``, ``idle_exit``: seconds without work after which it gives back its VRAM, and saves and exits (None: as
    the environment says).
    ``foreground``: it serves a person at a terminal, so it ends at its target and lives on when ComfyUI goes away.
    ``until``: a first target. ``save_every``, ``watch``: see ``Session``.
    """

    def __init__(self, run: RunDirectory, *, idle_park: float = 10.0, idle_exit: float | None = None,
                 save_every: int | None = None, foreground: bool = False, until: int | None = None,
                 watch: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__(run, until=until, save_every=save_every, watch=watch)
        self.idle_park, self.foreground = idle_park, foreground
        self.idle_exit = idle_seconds() if idle_exit is None else idle_exit
        self._session.idle_exit = self.idle_exit
        self._idle_since = time.monotonic()
        self._exit_code = 0
        self._was_finished = False
        self._abandons = False
        """Whether a signal ends what is done at once: the loading of a run, when there is nothing to save."""

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

    def _begin(self) -> None:
        states = [e["state"] for e in self.run.events_of("state") if e["state"] != "preparing"]
        self._was_finished = states[-1:] == ["finished"]
        self._session.begin()

    def _load(self) -> None:
        session = self._session
        self._abandons = True
        try:
            trainer = session.load()
            self._abandons = False
        except _Abandoned:
            return
        except Exception as error:
            self._abandons = False
            session.activity = "idle"
            self.failure = error
            session.fail(error)
            return
        with self._lock:
            session.use(trainer)
            if self._goal is not None and self._goal < trainer.step:
                self._goal = None
            if self._goal is not None and self._goal > trainer.step and trainer.step in self._pauses:
                self._pauses.discard(trainer.step)
                self._rest_on_the_way(trainer.step, self._goal)
                self._goal = None
            elif self._goal is not None:
                session.transition("training", target=self._goal)
            else:
                there = trainer.step >= (self.run.log.history().target or 0)  # it may have gone back since
                session.transition("finished" if self._was_finished and there else "paused")
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
                self._require_whole()
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
        elif self.foreground and idle > ON_THE_WAY and self.run.log.history().on_the_way is not None:
            self._go_on()
        elif idle > self.idle_exit:
            self._exit_idle()
        elif idle > self.idle_park:
            self._session.park()

    def _go_on(self) -> None:
        """Whoever wanted pictures on the way has gone, or is done."""
        with self._lock:
            now = self.run.log.history()
            waits = self._goal is None and now.state == "paused" and now.on_the_way is not None
            if waits and now.target and not self.closing:
                self.train(now.target)

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

    def _require_whole(self) -> None:
        """A run that went back to what turned out to be damaged, and has nothing else to go on from, is given up."""
        trainer = self._session.trainer
        if trainer is not None and trainer.torn and not self.quitting:
            self._exit_code, self.quitting = EXIT_FAILED, "the weights are read only in part"

    def _training_failed(self, error: Exception) -> None:
        """A user's error leaves whole weights and a worker that answers; anything else ends it, and says why."""
        trainer = self._session.trainer
        with self._lock:
            self._give_up_goal()
            self._session.fail(error)
            if not isinstance(error, ValueError) or trainer is None or trainer.torn:
                self._exit_code, self.quitting = EXIT_FAILED, "training failed"

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
        if self._abandons:
            self._abandons = False
            raise _Abandoned

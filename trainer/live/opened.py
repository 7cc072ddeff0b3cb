"""A run that a process has open: its engine, loaded or not, and the notes of what happens to it."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import RunConfig
from ..run import RunDirectory
from .fitting import Fitting, recorded_plan

if TYPE_CHECKING:
    from ..loop import Trainer

log = logging.getLogger(__name__)


class OpenedRun:
    """The run's lock is held by the caller. ``watch(event)`` is called after each event."""

    def __init__(self, run: RunDirectory, watch: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.run = run
        run.log.patient = True
        self.trainer: Trainer | None = None
        self.activity = "loading"
        """What the engine is doing: loading, training, evaluating, predicting, saving, exporting or idle."""
        self.exporting: dict[str, Any] | None = None
        """While it exports: ``what`` is done, and bytes ``done`` of ``total``."""
        self.parked = False
        self.idle_exit: float | None = None
        """Seconds at rest after which the run leaves the memory."""
        self._watch = watch
        self._uid = run.uid
        self._described: tuple[RunConfig, dict[str, Any]] | None = None
        self._measured = time.monotonic()
        self._fitting = Fitting(run, self.event)

    # -- in and out

    def begin(self) -> None:
        """Note that the run is being loaded, and the step it goes on from: whoever asks from now on is told that."""
        self.activity = "loading"
        source = self.run.source()
        if self.state is None and source is not None:
            log.warning("the run's events are lost: its history begins anew with the save point of step %d",
                        source.step)
            self.transition("created")
        self.transition("preparing")
        if source is not None or self.run.losses():
            fresh = {"fresh": True} if source is not None and source.fresh else {}
            self.event("resumed", durable=True, step=source.step if source else 0, **fresh)

    def load(self) -> Trainer:
        """The engine as the run's source left it (the model's file where there is none). Not yet in use."""
        from ..loop import Trainer

        described, source = self._description(), self.run.source()
        plan = recorded_plan(self.run)
        # A save point holds all the weights: those of the model's file, which may be gone, need not be read.
        fill = None if source is None else lambda stages: None
        trainer = Trainer(described[0], self.run.path, dataset=described[1], rollbacks=self.run.rollbacks,
                          skipped=self.run.skipped, plan=plan, info=self.run.flux(resumed=source is not None),
                          fill=fill)
        self._fitting.begin(trainer, plan)
        taken = self.run.resume(trainer.load)  # an earlier one, if that is damaged
        assert taken is None or trainer.step == taken.step, (trainer.step, taken)
        self._described = described
        self.activity = "idle"
        return trainer

    def use(self, trainer: Trainer) -> None:
        """Go on with what ``load`` gave."""
        self.trainer, self.parked = trainer, False
        self._measured = time.monotonic()

    def _description(self) -> tuple[RunConfig, dict[str, Any]]:
        """The settings and data on disk, with the learning rate that was set since."""
        config, lr = self.run.config, self.run.log.history().lr_set
        return config if lr is None else with_lr(config, lr), self.run.dataset

    @property
    def described_anew(self) -> bool:
        """Whether settings or data were changed on disk since the engine was made from them (Start does so)."""
        return self._described != self._description()

    def take_description(self) -> bool:
        """Have the engine go on under the settings and data on disk. False where that needs another engine."""
        trainer = self.trainer
        assert trainer is not None, "the run is not loaded"
        described, plan = self._description(), recorded_plan(self.run)
        if not trainer.reconfigure(*described, plan):
            return False
        self._fitting.begin(trainer, plan)
        self._described = described
        return True

    def drop(self) -> None:
        """Let go of the engine and its memory, all of it: another one may need as much."""
        if self.trainer is not None:
            self.trainer.park()
        self.trainer = None
        gc.collect()  # its parts know each other

    def park(self) -> None:
        """Give back the VRAM; whatever needs it next takes it again."""
        if self.trainer is not None and not self.trainer.torn and not self.parked:
            self.trainer.park()
            self._note_memory(waits=None, idle_exit=self.idle_exit)
        self.parked = True

    # -- notes

    def _note_memory(self, **fields: Any) -> None:
        assert self.trainer is not None
        used = self.trainer.usage()
        told = {"vram_gb": used["vram_gb"], "ram_gb": used["ram_gb"], "waits": used["waits_for"]}
        self.event("memory", **told | fields)

    @property
    def gone(self) -> bool:
        """Whether the run's folder was deleted or moved under it: nothing may be written where it was."""
        return not self.run.is_still(self._uid)

    @property
    def state(self) -> str | None:
        """The run's state, as noted last."""
        return self.run.log.history().state

    def event(self, kind: str, *, durable: bool = False, **fields: Any) -> None:
        """Note that something happened."""
        if not self.gone:
            self._tell(self.run.append(kind, durable=durable, **fields))

    def transition(self, state: str, **fields: Any) -> None:
        """Move the run to another state."""
        if not self.gone:
            self._tell(self.run.transition(state, **fields))

    def fail(self, error: Exception) -> None:
        """Note why the run cannot go on. What is not the user's fault goes to the log with its traceback."""
        user = isinstance(error, ValueError)
        log.error("%s", error, exc_info=None if user else error)
        message = str(error) if user else f"{type(error).__name__}: {error}"
        self.transition("failed", error=" ".join(message.split()))

    def _tell(self, event: dict[str, Any]) -> None:
        if self._watch is not None:
            try:
                self._watch(event)
            except Exception:  # a terminal that was closed, say, is no reason to end a training
                log.exception("an event could not be shown")

    def _engine(self, activity: str) -> Trainer:
        assert self.trainer is not None, "the run is not loaded"
        self.activity, self.parked = activity, False
        return self.trainer


def with_lr(config: RunConfig, lr: float) -> RunConfig:
    """The settings with another learning rate."""
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=lr))

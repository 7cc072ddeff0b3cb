"""A run with its engine: what can be done to it between two steps, each deed noted in its events.

Used by one thread, that which owns the engine. It knows nothing of clients, goals or idleness; ``worker.py`` does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .. import spikes
from ..export.describe import describe
from ..export.write import ExportOptions, export
from ..protocol import RunMovedOn
from ..run import RunDirectory
from ..saves import underway
from ..settings import number
from .opened import OpenedRun, with_lr

if TYPE_CHECKING:
    from torch import Tensor

    from ..loop import StepReport, Trainer

log = logging.getLogger(__name__)

TRIES = 3
"""So often in a row a run goes back to one save point by its own rules before it stops."""
MEASURED = 10.0
"""Seconds of training between two events that say what memory is in use."""


class Session(OpenedRun):
    """What can be done to an opened run between two steps.

    ``save_every``: steps between save points, instead of the recipe's.
    """

    def __init__(self, run: RunDirectory, *, save_every: int | None = None,
                 watch: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__(run, watch)
        self._save_every = save_every

    def step(self) -> int:
        """One update, and what is due after it. Returns the step reached: a lower one if the run went back by itself.

        ``ValueError`` where the run is to stop.
        """
        from ..loop import NonFiniteLoss

        trainer = self._engine("training")
        recipe = trainer.config.recipe
        try:
            report = self._fitting.step(trainer)
        except NonFiniteLoss as error:
            return self._bad_numbers(str(error), error.batch)
        self._note_step(trainer, report)
        if report.not_finite:
            return self._bad_numbers(self._not_finite(trainer, report), report.batch)
        if report.partial and recipe.on_out_of_memory == "roll back":
            return self._go_back("out of memory", "the GPU's memory ran out in the middle of a step")
        every = recipe.save_every_steps if self._save_every is None else self._save_every
        due = bool(every) and report.step % every == 0
        if due or 0 < 60 * recipe.save_every_minutes <= self.run.log.history().save_clock:
            self.try_save()
        if recipe.checkpoint_every_steps and report.step % recipe.checkpoint_every_steps == 0:
            self._checkpoint()
        if recipe.validate_every_steps and report.step % recipe.validate_every_steps == 0:
            self.validate_once()
        return report.step

    def _note_step(self, trainer: Trainer, report: StepReport) -> None:
        """The events of an update: what it was, whether its loss is a spike, what memory is in use."""
        told = {"not_finite": report.not_finite, "partial": report.partial}
        before = self.run.log.history().steps[-spikes.WINDOW :]
        last, count = before[-1] if before else {}, len(report.samples)
        images = last.get("images", trainer.config.recipe.batch_size * (report.step - 1)) + count
        whole = trainer.order.samples
        epoch = last.get("epoch", (images - count) / whole) + count / whole
        self.event("step", step=report.step, loss=report.loss, lr=report.lr, seconds=report.seconds, images=images,
                   epoch=round(epoch, 6), **{name: value for name, value in told.items() if value})
        usual = spikes.usual([e["loss"] for e in before], report.loss)
        spiked = self.run.log.history().spiked
        if usual is not None and not (spiked is not None and report.step - spiked <= spikes.QUIET):
            self.event("spike", step=report.step, loss=report.loss, usual=usual)
        if time.monotonic() - self._measured >= MEASURED:
            self._measured = time.monotonic()
            self._note_memory()

    def _not_finite(self, trainer: Trainer, report: StepReport) -> str:
        stages = ", ".join(report.not_finite[:5])
        stages += f" and {len(report.not_finite) - 5} more" if len(report.not_finite) > 5 else ""
        return (f"the gradients of step {report.step} are too large or not numbers in {stages} (pictures:"
                f" {trainer.where(report.samples, report.timesteps)}); the weights there were left as they were. Lower"
                " the learning rate, or take those pictures out of the dataset, then train on")

    # -- when a step went wrong

    def _bad_numbers(self, error: str, batch: int) -> int:
        """Stop, or go back and leave the batch out, as the recipe says."""
        self.event("bad_numbers", step=self.run.log.history().step, batch=batch, error=error)
        if self._engine("training").config.recipe.on_bad_numbers != "roll back":
            raise ValueError(error)
        return self._go_back("bad numbers", error, skip=batch)

    def _go_back(self, why: str, error: str, skip: int | None = None) -> int:
        """Go on from the newest save point (the beginning, where there is none); stop if that has not helped before."""
        tries = self._tries()
        if tries >= TRIES:
            raise ValueError(f"{error} (the run went back {tries} times in a row before, which did not help)")
        log.warning("%s: going back", error)
        return self.roll_back(why=why, skip=skip)

    def _tries(self) -> int:
        """How often the run has gone back by itself since it got further (a save point) or was told to go on."""
        count = 0
        for event in reversed(self.run.events_of("rolled_back", "saved", "state")):
            if event["type"] == "rolled_back" and event.get("why"):
                count += 1
            elif event["type"] in ("saved", "rolled_back") or event.get("state") == "failed":
                break
        return count

    def roll_back(self, step: int | None = None, *, fresh: bool = False, why: str = "", skip: int | None = None) -> int:
        """Go on from the save point or checkpoint of ``step`` (None: the newest), which is returned.

        ``ValueError``, and nothing has changed, where there is none or it does not fit the run's settings. Where it is
        found damaged only while it is read, the engine has what the run goes on from.
        """
        trainer = self._engine("loading")
        source, read = self.run.find_source(step, fresh=fresh), False
        try:
            trainer.load(source)
            read = True
            told = self.run.take_back(source, why=why, skip=skip)
        except Exception:
            if read or trainer.torn:
                self._return(trainer)
            raise
        finally:
            self.activity = "idle"
        self._tell(told)
        trainer.rollbacks, trainer.skipped = self.run.rollbacks, self.run.skipped
        self.use(trainer)
        return trainer.step

    def _return(self, trainer: Trainer) -> None:
        """Half read, or what was read cannot be noted: have the engine be where the run is, on the disk and by its
        events. If that fails the engine stays torn, so that nothing of it is saved."""
        if self.run.resume(trainer.load) is None:
            trainer.load(None)
        trainer.rollbacks, trainer.skipped = self.run.rollbacks, self.run.skipped
        self.event("resumed", durable=True, step=trainer.step)

    # -- other deeds

    def set_lr(self, lr: float) -> None:
        """Train with another learning rate from the next step on."""
        number("learning rate", lr, 0.0, 1.0)
        trainer = self._engine("training")
        self.event("lr", durable=True, step=trainer.step, lr=lr)
        trainer.config = with_lr(trainer.config, lr)
        if self._described is not None:
            self._described = with_lr(self._described[0], lr), self._described[1]

    def validate_once(self) -> None:
        """The loss of the pictures that are never trained, if there are any and it is not known of this step."""
        trainer = self._engine("evaluating")
        if trainer.step in [e["step"] for e in self.run.log.history().validations]:
            return
        loss = trainer.validate()
        if loss is not None:
            self.event("validated", step=trainer.step, loss=loss)

    def _checkpoint(self) -> None:
        """A weights-only checkpoint of this step. One that cannot be written costs nothing else."""
        trainer = self._engine("saving")
        try:
            about = describe(self.run, trainer.config, step=trainer.step, variant=trainer.info.variant, dtype="bf16")
            entries, keep = trainer.entries("bf16"), trainer.config.recipe.keep_checkpoints
            with underway.noted(self.run.path, underway.CHECKPOINT, trainer.step, sum(e.nbytes for e in entries)):
                path = self.run.write_checkpoint(trainer.step, entries, about, keep)
        except (ValueError, OSError) as error:
            log.error("%s", error)
            self.event("checkpoint_failed", step=trainer.step, error=" ".join(str(error).split()))
        else:
            self.event("checkpoint", durable=True, step=trainer.step, file=path.name)

    def evaluate(self) -> dict[str, Any]:
        """The loss at fixed noise and timesteps, and the step it is of."""
        trainer = self._engine("evaluating")
        loss = trainer.evaluate()
        self.event("eval", step=trainer.step, loss=loss)
        return {"step": trainer.step, "loss": loss}

    def evaluate_once(self) -> None:
        """``evaluate``, unless that was done at this step."""
        trainer = self._engine("evaluating")
        if trainer.step not in [step for step, _ in self.run.evals()]:
            self.evaluate()

    def predict(self, tensors: Mapping[str, Tensor], step: int | None, *, ema: bool = False) -> Tensor:
        """Velocity of the weights as they are, or their average; ``RunMovedOn`` if the run is not at a given ``step``.
        """
        trainer = self._engine("predicting")
        if step is not None and step != trainer.step:
            raise RunMovedOn.between(step, trainer.step)
        missing = [name for name in ("x", "timestep", "context", "pooled") if name not in tensors]
        if missing:
            raise ValueError(f"a prediction needs {missing[0]}")
        return trainer.predict(tensors["x"], tensors["timestep"], tensors["context"], tensors["pooled"],
                               tensors.get("guidance"), ema=ema)

    def export(self, path: str, options: ExportOptions, ended: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Write a file of the run to ``path``; see ``export.write.export``. ``ended``: whether it is to be given up."""
        trainer = self._engine("exporting")

        def report(what: str, done: int, total: int) -> None:
            self.exporting = {"what": what, "done": done, "total": total}
            if ended():
                raise ValueError("the export was stopped: nothing was written")

        try:
            done = export(self.run, path, options, trainer=trainer, progress=report)
        finally:
            self.exporting = None
        if not self.gone:
            self._tell(self.run.note_export(done))
        return done

    def save(self) -> int:
        """A save point of this step, unless there is one or nothing was trained. ``ValueError`` if it cannot be."""
        from ..saves.checkpoint import state_bytes

        trainer = self.trainer
        if trainer is None or trainer.torn:
            return 0
        if self.gone:
            raise ValueError(f"run {self.run.name!r} cannot be saved: its folder {self.run.path} was deleted or moved")
        source = self.run.source()
        if trainer.step > (source.step if source else 0):
            self.activity, started = "saving", time.monotonic()
            try:
                with underway.noted(self.run.path, underway.SAVE_POINT, trainer.step, state_bytes(trainer.stages)):
                    self.run.write_save_point(trainer.step, trainer.save, trainer.config.recipe.keep_save_points)
            except OSError as error:
                raise ValueError(f"the save point of step {trainer.step} could not be written:"
                                 f" {error.strerror or error}; free some space for {self.run.path}") from error
            seconds = round(time.monotonic() - started, 3)
            self.event("saved", durable=True, step=trainer.step, seconds=seconds)
        return trainer.step

    def try_save(self) -> bool:
        """``save`` if possible; if not, say so: the run goes on, and the older save point is whole."""
        try:
            self.save()
            return True
        except ValueError as error:
            log.error("%s", error)
            # The clock begins anew with this event, or it would be tried again at every step.
            self.event("save_failed", step=self.trainer.step if self.trainer else 0, error=str(error))
            return False

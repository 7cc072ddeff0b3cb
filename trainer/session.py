"""A run with its engine: what can be done to it between two steps, each deed noted in its events.

Used by one thread, that which owns the engine. It knows nothing of clients, goals or idleness; ``worker.py`` does.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .config import RunConfig
from .export import export_checkpoint
from .memory import machine
from .memory import plan as planning
from .protocol import RunMovedOn
from .run import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

    from .loop import StepReport, Trainer

log = logging.getLogger(__name__)


class Session:
    """The engine of one run, loaded or not. The run's lock is held by the caller.

    ``save_every``: steps between save points, instead of the recipe's. ``watch(event)`` is called after each event.
    """

    def __init__(self, run: RunDirectory, *, save_every: int | None = None,
                 watch: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.run = run
        run.log.patient = True
        self.trainer: Trainer | None = None
        self.activity = "loading"
        """What the engine is doing: loading, training, evaluating, predicting, saving, exporting or idle."""
        self.parked = False
        self._save_every, self._watch = save_every, watch
        self._uid = run.uid
        self._described: tuple[RunConfig, dict[str, Any]] | None = None
        self._unsaved_seconds = 0.0
        self._tried = True
        """Whether a step is known to fit the GPU's memory."""

    # -- in and out

    def begin(self) -> None:
        """Note that the run is being loaded, and the step it goes on from: whoever asks from now on is told that."""
        self.activity = "loading"
        point = self.run.latest_save_point()
        if self.state is None and point is not None:
            log.warning("the run's events are lost: its history begins anew with the save point of step %d", point.step)
            self.transition("created")
        self.transition("preparing")
        if point is not None or self.run.losses():
            self.event("resumed", durable=True, step=point.step if point else 0)

    def load(self) -> Trainer:
        """The engine as the newest save point left it (the model's file where there is none). Not yet in use."""
        from .loop import Trainer

        described = (self.run.config, self.run.dataset)
        plan, point = self._recorded_plan(), self.run.latest_save_point()
        # A save point holds all the weights: those of the model's file, which may be gone, need not be read.
        fill = None if point is None else lambda stages: None
        trainer = Trainer(described[0], self.run.path, dataset=described[1], rollbacks=self.run.rollbacks, plan=plan,
                          info=self.run.flux(resumed=point is not None), fill=fill)
        self._note_plan(trainer, plan)
        if point is not None:
            trainer.load(point.path)
            assert trainer.step == point.step, (trainer.step, point)
        self._described = described
        self.activity = "idle"
        return trainer

    def use(self, trainer: Trainer) -> None:
        """Go on with what ``load`` gave."""
        self.trainer, self.parked, self._unsaved_seconds = trainer, False, 0.0
        # The host's memory is no matter of trying.
        self._tried = trainer.device.type == "cpu"

    def _plan_key(self) -> str:
        config = self.run.config
        shapes = [tuple(sample["shape"]) for sample in self.run.dataset["samples"]]
        return planning.key(config, shapes, machine.identity(config.memory.device))

    def _recorded_plan(self) -> planning.Plan | None:
        """The plan that this run was given before, if it is still for these settings and this machine."""
        last = next((e for e in reversed(self.run.events()) if e["type"] in ("planned", "out_of_memory")), None)
        if last is None or last["key"] != self._plan_key():
            return None
        try:
            return planning.from_dict(last["plan"])
        except TypeError:  # an older version's
            return None

    def _note_plan(self, trainer: Trainer, recorded: planning.Plan | None) -> None:
        if recorded is None:
            self.event("planned", plan=planning.to_dict(trainer.plan), key=self._plan_key())

    @property
    def described_anew(self) -> bool:
        """Whether settings or data were changed on disk since the engine was made from them (Start does so)."""
        return self._described != (self.run.config, self.run.dataset)

    def take_description(self) -> bool:
        """Have the engine go on under the settings and data on disk. False where that needs another engine."""
        trainer = self.trainer
        assert trainer is not None, "the run is not loaded"
        described = (self.run.config, self.run.dataset)
        plan = self._recorded_plan()
        if not trainer.reconfigure(*described, plan):
            return False
        self._note_plan(trainer, plan)
        self._described = described
        self._tried = trainer.device.type == "cpu"
        return True

    def drop(self) -> None:
        """Let go of the engine and its memory, all of it: another one may need as much."""
        if self.trainer is not None:
            self.trainer.park()
        self.trainer = None
        gc.collect()  # its parts know each other

    # -- deeds

    def step(self) -> int:
        """One update, and a save point if one is due. Returns the step reached."""
        trainer = self._engine("training")
        report = self._within_memory(trainer)
        told = {"not_finite": report.not_finite, "partial": report.partial}
        self.event("step", step=report.step, loss=report.loss, lr=report.lr, seconds=report.seconds,
                   **{name: value for name, value in told.items() if value})
        self._unsaved_seconds += report.seconds
        recipe = trainer.config.recipe
        every = recipe.save_every_steps if self._save_every is None else self._save_every
        due = bool(every) and report.step % every == 0
        if due or 0 < 60 * recipe.save_every_minutes <= self._unsaved_seconds:
            self.try_save()
        if report.not_finite:
            raise ValueError(self._not_finite(trainer, report))
        return report.step

    @staticmethod
    def _not_finite(trainer: Trainer, report: StepReport) -> str:
        stages, pictures = (", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                            for names in (report.not_finite, trainer.data.names(report.samples)))
        return (f"the gradients of step {report.step} are too large or not numbers in {stages} (pictures: {pictures});"
                " the weights there were left as they were. Lower the learning rate, or take those pictures out of the"
                " dataset, then train on")

    def _within_memory(self, trainer: Trainer) -> StepReport:
        """One update, whatever the GPU's memory allows; a partial one if it ran out when some weights had changed.

        The first step is tried out with its updates thrown away: if the memory runs out, it does so there, and nothing
        is lost. ``ValueError`` if the run does not fit however little is on the GPU at once.
        """
        import torch

        while True:
            try:
                if not self._tried:
                    trainer.warm_up()
                    self._tried = True
                return trainer.train_step()
            except torch.cuda.OutOfMemoryError as error:
                what = str(error).partition("\n")[0]
            # Out here nothing holds the failed step's tensors any more.
            cut, stages = trainer.cut_short(), len(trainer.stages)
            updated = cut.partial[0] if cut is not None and cut.partial else 0
            if not trainer.tighten():
                raise ValueError(f"the GPU's memory is too small for a step ({what}): lower resolution or batch_size,"
                                 " or close other programs that use the GPU")
            self._tried = trainer.device.type == "cpu"
            plan = trainer.plan
            log.warning("out of GPU memory, %d of %d stages updated (%s): now %d blocks are swapped, activations %s",
                        updated, stages, what, plan.blocks_to_swap, "too" if plan.activation_offload else "not")
            self.event("out_of_memory", durable=True, step=trainer.step, updated=updated, stages=stages,
                       plan=planning.to_dict(plan), key=self._plan_key())
            if cut is not None:
                return cut

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

    def predict(self, tensors: Mapping[str, Tensor], step: int | None) -> Tensor:
        """Velocity of the weights as they are; ``RunMovedOn`` if ``step`` is given and the run is elsewhere."""
        trainer = self._engine("predicting")
        if step is not None and step != trainer.step:
            raise RunMovedOn.between(step, trainer.step)
        missing = [name for name in ("x", "timestep", "context", "pooled") if name not in tensors]
        if missing:
            raise ValueError(f"a prediction needs {missing[0]}")
        return trainer.predict(tensors["x"], tensors["timestep"], tensors["context"], tensors["pooled"],
                               tensors.get("guidance"))

    def export(self, path: str, dtype: str, metadata: Mapping[str, str] | None, overwrite: bool) -> dict[str, Any]:
        """Write the weights as they are to ``path``; see ``export_checkpoint``."""
        trainer = self._engine("exporting")
        done = export_checkpoint(trainer, path, dtype, overwrite=overwrite, metadata=metadata)
        self.event("exported", step=trainer.step, dtype=dtype, file=os.path.basename(path))
        return done

    def save(self) -> int:
        """A save point of this step, unless there is one or nothing was trained. ``ValueError`` if it cannot be."""
        trainer = self.trainer
        if trainer is None or trainer.torn:
            return 0
        if self.gone:
            raise ValueError(f"run {self.run.name!r} cannot be saved: its folder {self.run.path} was deleted or moved")
        point = self.run.latest_save_point()
        if trainer.step > (point.step if point else 0):
            self.activity, started = "saving", time.monotonic()
            try:
                self.run.write_save_point(trainer.step, trainer.save)
            except OSError as error:
                raise ValueError(f"the save point of step {trainer.step} could not be written:"
                                 f" {error.strerror or error}; free some space for {self.run.path}") from error
            seconds = round(time.monotonic() - started, 3)
            self.event("saved", durable=True, step=trainer.step, seconds=seconds)
        self._unsaved_seconds = 0.0
        return trainer.step

    def try_save(self) -> bool:
        """``save`` if possible; if not, say so: the run goes on, and the older save point is whole."""
        try:
            self.save()
            return True
        except ValueError as error:
            log.error("%s", error)
            self._unsaved_seconds = 0.0  # or it would be tried again at every step
            self.event("save_failed", step=self.trainer.step if self.trainer else 0, error=str(error))
            return False

    def park(self) -> None:
        """Give back the VRAM; whatever needs it next takes it again."""
        if self.trainer is not None and not self.trainer.torn and not self.parked:
            self.trainer.park()
        self.parked = True

    # -- notes

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

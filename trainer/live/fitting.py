"""Making steps fit the GPU's memory: the plan a run was given, and what gives way when that was too much."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..memory import machine
from ..memory import plan as planning

if TYPE_CHECKING:
    from ..loop import StepReport, Trainer
    from ..run import RunDirectory

log = logging.getLogger(__name__)


def plan_key(run: RunDirectory) -> str:
    """Of the settings, picture sizes and machine that a plan is for."""
    config = run.config
    shapes = [tuple(sample["shape"]) for sample in run.dataset["samples"]]
    return planning.key(config, shapes, machine.identity(config.memory.device))


def recorded_plan(run: RunDirectory) -> planning.Plan | None:
    """The plan that this run was given before, if it is still for these settings and this machine."""
    told = run.events_of("planned", "out_of_memory")
    if not told or told[-1]["key"] != plan_key(run):
        return None
    try:
        return planning.from_dict(told[-1]["plan"])
    except TypeError:  # an older version's
        return None


class Fitting:
    """Has a trainer's steps fit. ``note(kind, **fields)`` adds an event to the run's."""

    def __init__(self, run: RunDirectory, note: Callable[..., Any]) -> None:
        self._run, self._note = run, note
        self._tried = True
        """Whether a step is known to fit the GPU's memory."""

    def begin(self, trainer: Trainer, recorded: planning.Plan | None) -> None:
        """Under another plan, or with another engine, it is to be tried anew."""
        if recorded is None:
            self._note("planned", plan=planning.to_dict(trainer.plan), key=plan_key(self._run))
        self._tried = trainer.device.type == "cpu"  # the host's memory is no matter of trying

    def step(self, trainer: Trainer) -> StepReport:
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
            self._note("out_of_memory", durable=True, step=trainer.step, updated=updated, stages=stages,
                       plan=planning.to_dict(plan), key=plan_key(self._run))
            if cut is not None:
                return cut

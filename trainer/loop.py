"""The engine: a Flux in training, one step at a time. The step itself is ``Trainer.train_step``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from . import flow
from .data.batches import Dataset
from .data.order import Order, batch_number, counters_of
from .engine import Engine
from .flux.model import patchify
from .memory.averaged import visit_average
from .walk import MicroBatch, Stage, predict_head, walk_back, walk_out

log = logging.getLogger(__name__)

EVALUATED = LEVELS = 16
"""Samples that ``Trainer.evaluate`` looks at, at most; noise levels at which losses are measured."""
VALIDATED = 64
"""Losses that ``Trainer.validate`` measures, at most."""
Measured = tuple[int, float, tuple[int | str, ...]]
"""A sample, a noise level, and the counters of its noise."""


class NonFiniteLoss(ValueError):
    """The loss is NaN or infinite; no weight was changed by that step. ``batch``: the number of what was trained."""

    def __init__(self, message: str, batch: int) -> None:
        super().__init__(message)
        self.batch = batch


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one update did.

    ``batch`` is the number of the batch (``order.batch_number``); ``seconds`` is wall time; ``timesteps`` the noise
    level of each sample; ``not_finite`` names the stages whose gradients were not all finite: what they hold of that
    dtype was left as it was. ``partial``: the step was cut short when so many stages, of so many, had been updated.
    """

    step: int
    batch: int
    loss: float
    lr: float
    seconds: float
    samples: tuple[int, ...]
    timesteps: tuple[float, ...]
    not_finite: tuple[str, ...] = ()
    partial: tuple[int, int] | None = None


class Trainer(Engine):
    """The engine in training, one step at a time, and what else is asked of its weights. Used by one thread."""

    _begun = (0.0, StepReport(step=0, batch=0, loss=math.nan, lr=0.0, seconds=0.0, samples=(), timesteps=()))
    """When the step under way was begun, and its report so far."""

    @property
    def order(self) -> Order:
        """In which order the samples are trained."""
        return self.data.order(self.config.recipe.batch_size, self.config.recipe.training_seed)

    def train_step(self) -> StepReport:
        """One update of all weights. Raises ``NonFiniteLoss`` before any weight has changed."""
        started, step, recipe = time.perf_counter(), self.step + 1, self.config.recipe
        lr = flow.learning_rate(self.config.optimizer.lr, recipe, step)
        batch = batch_number(step, self.skipped)
        samples = self.order.batch(batch)
        # Beyond those of the run whose export this one began with: its noise is not seen again either.
        counters = counters_of(recipe.training_seed, self.rollbacks, self.info.parent_steps + step, samples)
        levels = [flow.timestep(recipe, self.data.shapes[i], *c) for i, c in zip(samples, counters, strict=True)]
        micros = self._micro_batches(samples, levels, counters)

        def check() -> None:
            loss = self._finite_loss(micros, samples, levels, step, batch)
            self._begun = started, StepReport(step=step, batch=batch, loss=loss, lr=lr, seconds=0.0,
                                              samples=(*samples,), timesteps=(*levels,))  # fmt: skip

        self._walk(micros, lr=lr, step=step, check=check)

        report = self._report()
        self.step, self.updated = step, []
        self.seconds += report.seconds
        return report

    def cut_short(self) -> StepReport | None:
        """What the step that an error cut short has done; None where that is nothing."""
        return replace(self._report(), partial=(len(self.updated), len(self.stages))) if self.updated else None

    def _report(self) -> StepReport:
        """Of the step under way, as far as its updates have come."""
        started, report = self._begun
        updated = [(s.name, g.finite) for s in self.stages if s.name in self.updated for g in s.arena.groups]
        flags = [flag for _, flag in updated if flag is not None]
        fine = torch.stack(flags).tolist()  # one wait for the device, not one a group
        bad = dict.fromkeys(name for (name, _), ok in zip(updated, fine, strict=True) if not ok)
        return replace(report, seconds=time.perf_counter() - started, not_finite=tuple(bad))

    def _walk(
        self, micros: list[MicroBatch], *, lr: float, step: int, check: Callable[[], object], keep: bool = True
    ) -> None:
        """Out along the stages, and back with an update of each; ``check`` is called before the first and may raise."""
        *body, head = self.stages
        back = [head, *reversed(body)]
        arenas = [stage.arena for stage in back]
        self.keeper.clear()
        self.conveyor.begin([*(stage.arena for stage in body), *arenas], updates=arenas)
        walk_out(self.conveyor.visit, body, micros, self.keeper)
        for stage in back:
            with self.conveyor.visit(stage.arena):
                for m in reversed(micros):
                    with self._inputs(stage, m) as inputs:
                        walk_back(stage, m, inputs, add=m is not micros[-1])
            if stage is head:
                check()
            stage.arena.update(lr=lr, step=step, keep=keep)
            if keep:
                self.updated.append(stage.name)

    def warm_up(self) -> None:
        """A step on the largest pictures whose updates are thrown away: it takes as much memory as any step will.

        Raises ``torch.OutOfMemoryError`` where that is too much, before any weight has changed. It is the first, too,
        to run the compiled updates: if the compiler fails, they are eager from then on, and the log says why.
        """
        recipe, shapes = self.config.recipe, self.data.shapes
        largest = max(range(len(shapes)), key=lambda i: shapes[i][0] * shapes[i][1])
        samples = [largest] * recipe.batch_size
        counters = [("warm-up", i) for i in range(len(samples))]
        micros = self._micro_batches(samples, [0.5] * len(samples), counters, train=False)
        try:
            self._walk(micros, lr=0.0, step=self.step + 1, check=lambda: 0.0, keep=False)
            self.conveyor.streams.synchronize()
            return
        except Exception as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or not self.compiled():
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        log.warning("updates: eager from now on, since the compiler failed (%s)", why)
        self.compiled(False)
        self.park()
        self.warm_up()

    @torch.no_grad()
    def predict(
        self, x: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor, guidance: Tensor | None, *,
        ema: bool = False,
    ) -> Tensor:  # fmt: skip
        """Velocity of the weights as they are: float32 on the CPU, [B, C, h, w] like ``x``; see ``Flux.forward``.

        ``ema``: of their running average, at the price told in ``memory/averaged.py``; ``ValueError`` where there is
        none. Either way the weights stay as they are.
        """
        self.check_average(ema)
        m = self._micro_batch(x, timestep, context, pooled, guidance)
        *body, head = self.stages
        visit = partial(visit_average, self.conveyor) if ema else self.conveyor.visit
        self.conveyor.begin([stage.arena for stage in self.stages])
        walk_out(visit, body, [m])
        with visit(head.arena):
            return predict_head(self.model, m.hidden, m).float().cpu()

    def evaluate(self) -> float:
        """Mean loss of up to 16 samples at fixed noise and noise levels: comparable between steps."""
        levels = flow.fixed_timesteps(LEVELS)
        count = min(EVALUATED, len(self.data.shapes))
        # Neighbours in the folder are often alike: 7 steps around the 16 levels spread them over the range.
        return self._measure(self.data, [(i, levels[i * 7 % LEVELS], ("evaluate", i)) for i in range(count)])

    def validate(self) -> float | None:
        """Mean loss of the pictures that are never trained, at fixed noise and noise levels; None where there are none.

        At most 64 losses are measured, spread over pictures and levels: a forward pass each.
        """
        held_out, levels = self.data.validation, flow.fixed_timesteps(LEVELS)
        if held_out is None:
            return None
        pairs = flow.fixed_evaluations(len(held_out.shapes), VALIDATED, LEVELS)
        return self._measure(held_out, [(i, levels[at], ("validate", i, at)) for i, at in pairs])

    @torch.no_grad()
    def _measure(self, data: Dataset, wanted: Sequence[Measured]) -> float:
        """Mean loss. As many pictures as a batch has pass each stage in turn, so that its weights travel once."""
        losses: list[float] = []
        for start in range(0, len(wanted), size := self.config.recipe.batch_size):
            some = wanted[start : start + size]
            micros = [self._micro_batches([i], [t], [key], train=False, data=data)[0] for i, t, key in some]
            self.conveyor.begin([stage.arena for stage in self.stages])
            walk_out(self.conveyor.visit, self.stages, micros)
            losses += [float(m.losses.sum()) for m in micros if m.losses is not None]
        assert len(losses) == len(wanted)
        return sum(losses) / len(losses)

    def _inputs(self, stage: Stage, m: MicroBatch) -> AbstractContextManager[tuple[Tensor, ...]]:
        """What the stage was given on the way out: for the last one that is what ``m`` still carries."""
        return nullcontext(m.hidden) if stage is self.stages[-1] else self.keeper.taken()

    def _micro_batches(
        self, samples: Sequence[int], levels: Sequence[float], counters: Sequence[tuple], *, train: bool = True,
        data: Dataset | None = None,
    ) -> list[MicroBatch]:  # fmt: skip
        recipe, size = self.config.recipe, self.plan.micro_batch or len(samples)
        data = self.data if data is None else data
        micros = []
        for start in range(0, len(samples), size):
            part = slice(start, start + size)
            found = data.examples(samples[part], counters[part], recipe.caption_dropout, train=train)
            noise = torch.stack([flow.noise_like(found.latents.shape[1:], *c) for c in counters[part]])
            t = torch.tensor(levels[part], dtype=torch.float32)
            x, target = flow.noised(found.latents, noise, t)
            m = self._micro_batch(x, t, found.context, found.pooled, torch.full_like(t, recipe.guidance))
            m.target, m.share = target.to(self.device), 1 / len(samples)
            m.weight = found.weight if found.weight is None else found.weight.to(self.device)
            micros.append(m)
        return micros

    def _micro_batch(
        self, x: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor, guidance: Tensor | None
    ) -> MicroBatch:
        """``x`` [B, C, h, w] and its conditions, on the device in the model's dtypes."""
        height, width = x.shape[-2:]
        if not self.model.params.guidance_embed:
            guidance = None
        return MicroBatch(
            tokens=patchify(x.to(self.device, torch.float32)),
            context=context.to(self.device, self.dtype),
            pooled=pooled.to(self.device, self.dtype),
            timestep=timestep.to(self.device, torch.float32),
            guidance=guidance if guidance is None else guidance.to(self.device, torch.float32),
            rope=self.model.rope(height, width, context.shape[1], self.device),
            latent_size=(height, width),
        )

    def where(self, samples: Sequence[int], levels: Sequence[float]) -> str:
        """The pictures and their noise levels, for messages."""
        pairs = zip(self.data.names(samples), levels, strict=True)
        told = [f"{name} at noise level {level:.3f}" for name, level in pairs]
        return ", ".join(told[:10]) + (f" and {len(told) - 10} more" if len(told) > 10 else "")

    def _finite_loss(
        self, micros: Sequence[MicroBatch], samples: Sequence[int], levels: Sequence[float], step: int, batch: int
    ) -> float:
        each = torch.cat([m.losses for m in micros if m.losses is not None]).tolist()
        bad = [i for i, value in enumerate(each) if not math.isfinite(value)]
        if bad:
            where = self.where([samples[i] for i in bad], [levels[i] for i in bad])
            raise NonFiniteLoss(
                f"the loss of step {step} is not a number ({where}); no weight was changed. Lower the "
                "learning rate, or take those pictures out of the dataset",
                batch,
            )
        return sum(each) / len(each)

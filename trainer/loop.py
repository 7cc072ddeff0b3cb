"""The engine: a Flux in training, one step at a time. The step itself is ``Trainer.train_step``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checkpoint, flow
from .config import RunConfig
from .data.batches import Dataset, batch_indices
from .flux.model import build_meta, flux_params, hollow_, patchify
from .flux.variants import FileInfo, require_flux
from .memory.checks import eager_because
from .memory.conveyor import Conveyor, Keeper
from .memory.machine import cap_vram, pinnable_ram, this_machine
from .memory.plan import Plan, resolve, tighter
from .memory.streams import Streams, streams_for
from .optim.base import spec_from_config
from .walk import MicroBatch, Stage, build_stages, predict_head, run_head, walk_back, walk_out
from .weights import Entry

log = logging.getLogger(__name__)

EVALUATED = 16
"""Samples that ``Trainer.evaluate`` looks at, at most."""


class NonFiniteLoss(ValueError):
    """The loss is NaN or infinite; no weight was changed by that step."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one update did.

    ``seconds`` is wall time; ``timesteps`` the noise level of each sample; ``not_finite`` names the stages whose
    gradients were not all finite: what they hold of that dtype was left as it was. ``partial``: the step was cut short
    when so many stages, of so many, had been updated.
    """

    step: int
    loss: float
    lr: float
    seconds: float
    samples: tuple[int, ...]
    timesteps: tuple[float, ...]
    not_finite: tuple[str, ...] = ()
    partial: tuple[int, int] | None = None


class Trainer:
    """Owns the weights, the optimizer states and the device of one run. Used by one thread.

    ``dataset`` is the manifest (``dataset.json``), or what can be asked like a ``Dataset``; ``rollbacks`` counts how
    often the run was taken back to an earlier step, so that it never repeats its noise; ``plan`` what was decided for
    this run earlier (else it is decided now). ``info`` and ``fill(stages)`` stand in for the model's file.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        dataset: dict[str, Any] | Dataset,
        rollbacks: int = 0,
        plan: Plan | None = None,
        streams: Streams | None = None,
        info: FileInfo | None = None,
        fill: Callable[[Sequence[Stage]], None] | None = None,
    ):
        self.config, self.rollbacks, self._run_dir = config, rollbacks, run_dir
        self.stages: list[Stage] = []
        self.data = dataset if isinstance(dataset, Dataset) else Dataset(dataset, run_dir)
        self.info = info or require_flux(config.model.flux)
        self.plan = plan or self._resolve()
        self.device = torch.device(self.plan.device)
        if self.device.type == "cuda":
            cap_vram(self.device, config.memory.reserve_vram_gb)
        params = flux_params(self.info)
        base = torch.float32 if config.optimizer.weight_precision == "f32" else torch.bfloat16
        self.dtype = base
        self.model = hollow_(build_meta(params, base))
        self.conveyor = Conveyor(self.device, streams or streams_for(self.device, pinnable_ram()))
        self.keeper = Keeper(self.conveyor, offload=self.plan.activation_offload)
        why_eager = eager_because(self.device)
        log.info("updates: %s", f"eager, {why_eager}" if why_eager else "compiled")
        spec = replace(spec_from_config(config.optimizer, config.recipe.training_seed), compile=not why_eager)
        swapped = self.plan.blocks_to_swap
        self.stages = build_stages(self.model, config.recipe, spec, self.conveyor, swapped)
        if fill is not None:
            fill(self.stages)
        else:
            checkpoint.load_weights(self.stages, config.model.flux, self.info)
        self.step = 0
        """Updates done since the run began."""
        self.updated: list[str] = []
        """Stages that the step under way has updated. Not empty between steps only if one was cut short: these stages
        are then a step ahead of the others (each is whole), and nothing may be saved."""
        self._begun = (0.0, StepReport(step=0, loss=math.nan, lr=0.0, seconds=0.0, samples=(), timesteps=()))

    def train_step(self) -> StepReport:
        """One update of all weights. Raises ``NonFiniteLoss`` before any weight has changed."""
        started, step, recipe = time.perf_counter(), self.step + 1, self.config.recipe
        lr = flow.learning_rate(self.config.optimizer.lr, recipe, step)
        samples = batch_indices(self.data.shapes, recipe.batch_size, recipe.training_seed, step)
        counters = [(recipe.training_seed, self.rollbacks, step, i) for i in samples]
        levels = [flow.timestep(recipe, self.data.shapes[i], *c) for i, c in zip(samples, counters, strict=True)]
        micros = self._micro_batches(samples, levels, counters)

        def check() -> None:
            loss = self._finite_loss(micros, samples, levels, step)
            report = StepReport(step=step, loss=loss, lr=lr, seconds=0.0, samples=(*samples,), timesteps=(*levels,))
            self._begun = started, report

        self._walk(micros, lr=lr, step=step, check=check)

        report = self._report()
        self.step, self.updated = step, []
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
        walk_out(self.conveyor, body, micros, self.keeper)
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
            self._walk(micros, lr=0.0, step=max(self.step, 1), check=lambda: 0.0, keep=False)
            self.conveyor.streams.synchronize()
            return
        except Exception as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or not self._compiled():
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        log.warning("updates: eager from now on, since the compiler failed (%s)", why)
        self._compiled(False)
        self.park()
        self.warm_up()

    def _compiled(self, wanted: bool | None = None) -> bool:
        """Whether updates run through the compiler; ``wanted``: have them do so, or not."""
        groups = [group for stage in self.stages for group in stage.arena.groups]
        if wanted is not None:
            for group in groups:
                group.spec = replace(group.spec, compile=wanted)
        return any(group.spec.compile for group in groups)

    def tighten(self) -> bool:
        """After running out of the device's memory: make do with less. False if nothing is left to give up.

        A step that was cut short is left as it is: the stages in ``updated`` took part in it and the others did not.
        It counts as done, so that the next one has other noise.
        """
        self.keeper.clear()
        self.park()
        plan = tighter(self.plan, self._resolve)
        if plan is None:
            return False
        self._settle(plan)
        if self.updated:
            self.step, self.updated = self.step + 1, []
        return True

    def _settle(self, plan: Plan) -> None:
        """Have things live where ``plan`` says; all is at home."""
        self.plan = plan
        self.keeper = Keeper(self.conveyor, offload=plan.activation_offload)
        for i, stage in enumerate(self.stages[1:-1]):
            stage.arena.settle(resident=i >= plan.blocks_to_swap)

    def reconfigure(self, config: RunConfig, dataset: dict[str, Any], plan: Plan | None = None) -> bool:
        """Go on under other settings or on other data, between two steps, as if loaded anew with them.

        False, and nothing has changed, where that needs another engine: for another model, other states or weights,
        another place in memory. ``plan`` as in the constructor; None: the present one where batches stay as they are.
        """
        assert not self.torn
        old, new = self.config, config

        def kept(c: RunConfig) -> tuple[Any, ...]:
            o = c.optimizer
            return c.model.flux, o.kind, o.state_format, o.weight_precision, c.memory

        if kept(old) != kept(new):
            return False
        data = Dataset(dataset, self._run_dir)
        spec = spec_from_config(new.optimizer, new.recipe.training_seed)
        self.park()
        same = old.recipe.batch_size == new.recipe.batch_size and set(self.data.shapes) == set(data.shapes)
        self.config, self.data = new, data
        self._settle(plan or (self.plan if same else self._resolve()))
        self.stages[-1].run = run_head(self.model, new.recipe)
        for stage in self.stages:
            for group in stage.arena.groups:
                group.spec = replace(spec, state_format=group.spec.state_format, compile=group.spec.compile)
        return True

    def _resolve(self, **memory: Any) -> Plan:
        """The plan for this run, with some of its memory settings changed, on the device as it is now."""
        config = replace(self.config, memory=replace(self.config.memory, **memory))
        found = this_machine(config.memory.device, config.memory.reserve_vram_gb, now=True)
        if self.stages:  # what is free of the RAM is no matter to an engine that has its own
            found = replace(found, ram_now=None)
        return resolve(config, self.info, self.data.shapes, found)

    @torch.no_grad()
    def predict(self, x: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor, guidance: Tensor | None) -> Tensor:
        """Velocity of the weights as they are: float32 on the CPU, [B, C, h, w] like ``x``; see ``Flux.forward``."""
        m = self._micro_batch(x, timestep, context, pooled, guidance)
        *body, head = self.stages
        self.conveyor.begin([stage.arena for stage in self.stages])
        walk_out(self.conveyor, body, [m])
        with self.conveyor.visit(head.arena):
            return predict_head(self.model, m.hidden, m).float().cpu()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of up to 16 samples at fixed noise and noise levels: comparable between steps."""
        samples = range(min(EVALUATED, len(self.data.shapes)))
        # Neighbours in the folder are often alike: 7 steps around the 16 levels spread them over the range.
        levels = [flow.fixed_timesteps(EVALUATED)[i * 7 % EVALUATED] for i in samples]
        total = 0.0
        for i, level in zip(samples, levels, strict=True):
            (m,) = self._micro_batches([i], [level], [("evaluate", i)], train=False)
            self.conveyor.begin([stage.arena for stage in self.stages])
            walk_out(self.conveyor, self.stages, [m])
            assert m.losses is not None
            total += float(m.losses.sum())
        return total / len(samples)

    def entries(self, dtype: str) -> list[Entry]:
        """The weights under their file names, for ``weights.write_safetensors``: exact masters, cast to ``dtype``."""
        self.conveyor.streams.synchronize()
        return checkpoint.export_entries(self.stages, dtype)

    def save(self, directory: Path) -> None:
        """Write the full state into an existing, empty folder."""
        assert not self.torn, "a half-updated step is never saved"
        self.conveyor.streams.synchronize()
        checkpoint.save_state(self.stages, directory, step=self.step, rollbacks=self.rollbacks)

    def load(self, directory: Path) -> None:
        """Take up the state that ``save`` wrote. A folder that does not fit raises ``ValueError``."""
        self.conveyor.park()
        self.step = checkpoint.load_state(self.stages, directory)
        self.updated = []

    def park(self) -> None:
        """Give the device's memory back; the next use takes it again."""
        self.keeper.clear()
        self.conveyor.park()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def torn(self) -> bool:
        """Whether a step was cut short after some of its updates."""
        return bool(self.updated)

    def _inputs(self, stage: Stage, m: MicroBatch) -> AbstractContextManager[tuple[Tensor, ...]]:
        """What the stage was given on the way out: for the last one that is what ``m`` still carries."""
        return nullcontext(m.hidden) if stage is self.stages[-1] else self.keeper.taken()

    def _micro_batches(
        self, samples: Sequence[int], levels: Sequence[float], counters: Sequence[tuple], *, train: bool = True
    ) -> list[MicroBatch]:
        recipe, size = self.config.recipe, self.plan.micro_batch or len(samples)
        micros = []
        for start in range(0, len(samples), size):
            part = slice(start, start + size)
            latents = self.data.latents(samples[part]).float()
            noise = torch.stack([flow.noise_like(latents.shape[1:], *c) for c in counters[part]])
            t = torch.tensor(levels[part], dtype=torch.float32)
            x, target = flow.noised(latents, noise, t)
            dropped = [train and flow.is_dropped(recipe.caption_dropout, *c) for c in counters[part]]
            context, pooled = self.data.captions(samples[part], dropped)
            m = self._micro_batch(x, t, context, pooled, torch.full_like(t, recipe.guidance))
            m.target, m.share = target.to(self.device), 1 / len(samples)
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

    def _finite_loss(
        self, micros: Sequence[MicroBatch], samples: Sequence[int], levels: Sequence[float], step: int
    ) -> float:
        each = torch.cat([m.losses for m in micros if m.losses is not None]).tolist()
        bad = [i for i, value in enumerate(each) if not math.isfinite(value)]
        if bad:
            names = self.data.names([samples[i] for i in bad])
            where = ", ".join(f"{name} at noise level {levels[i]:.3f}" for name, i in zip(names, bad, strict=True))
            raise NonFiniteLoss(
                f"the loss of step {step} is not a number ({where}); no weight was changed. Lower the "
                "learning rate, or take those pictures out of the dataset"
            )
        return sum(each) / len(each)

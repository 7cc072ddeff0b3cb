"""What a run trains with: the weights and states, the device they stream through, and the plan of where they live."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .config import RunConfig
from .data.batches import Dataset
from .files import Damaged
from .flux.model import build_meta, flux_params, hollow_
from .flux.variants import FileInfo, require_flux
from .memory.checks import eager_because
from .memory.conveyor import Conveyor, Keeper
from .memory.machine import GIB, cap_vram, pinnable_ram, resident_ram, this_machine
from .memory.plan import Plan, resolve, tighter
from .memory.streams import Streams, streams_for
from .memory.timing import WAITING
from .optim.base import spec_from_config
from .saves import checkpoint
from .saves.savepoints import Source
from .walk import Stage, build_stages, run_head
from .weights import Entry

log = logging.getLogger(__name__)


class Engine:
    """The weights, the optimizer states and the device of one run, between two steps. Used by one thread.

    ``dataset`` is the manifest (``dataset.json``), or what can be asked like a ``Dataset``; ``rollbacks`` counts how
    often the run was taken back to an earlier step, so that it never repeats its noise; ``skipped`` are the numbers of
    batches that are left out; ``plan`` what was decided for this run earlier (else it is decided now). ``info`` and
    ``fill(stages)`` stand in for the model's file.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        dataset: dict[str, Any] | Dataset,
        rollbacks: int = 0,
        skipped: Sequence[int] = (),
        plan: Plan | None = None,
        streams: Streams | None = None,
        info: FileInfo | None = None,
        fill: Callable[[Sequence[Stage]], None] | None = None,
    ):
        self.config, self.rollbacks, self.skipped, self._run_dir = config, rollbacks, skipped, run_dir
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
        spec = spec_from_config(config.optimizer, config.recipe.training_seed, config.recipe.ema_decay)
        spec = replace(spec, compile=not why_eager)
        swapped = self.plan.blocks_to_swap
        self.stages = build_stages(self.model, config.recipe, spec, self.conveyor, swapped)
        if fill is not None:
            fill(self.stages)
        else:
            checkpoint.load_weights(self.stages, config.model.flux, self.info, config.model.loras)
        self.step = 0
        """Updates done since the run began."""
        self.since = 0
        """The step after which the moments were all zero: above 0 where they were begun anew on the way."""
        self.seconds = 0.0
        """Spent in steps by this engine."""
        self._asked = 0, 0.0
        self.updated: list[str] = []
        """Stages that the step under way has updated. Not empty between steps only if one was cut short: these stages
        are then a step ahead of the others (each is whole), and nothing may be saved."""

    @property
    def torn(self) -> bool:
        """Whether a step was cut short after some of its updates, or a state was read only in part."""
        return bool(self.updated)

    def park(self) -> None:
        """Give the device's memory back; the next use takes it again."""
        self.keeper.clear()
        self.conveyor.park()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def save(self, directory: Path) -> dict[str, str]:
        """Write the full state into an existing, empty folder; returns the SHA-256 of its files by name."""
        assert not self.torn, "a half-updated step is never saved"
        self.conveyor.streams.synchronize()
        counters = {"step": self.step, "rollbacks": self.rollbacks, "since": self.since}
        return checkpoint.save_state(self.stages, directory, counters)

    def load(self, source: Path | Source | None) -> None:
        """Take up the state that ``save`` wrote, or whatever else a run goes on from; see ``checkpoint.load``.

        None: the model's own weights, as before the first step. What is found damaged leaves the engine ``torn``; any
        other ``ValueError`` says that nothing has changed.
        """
        self.park()  # what a step that was cut short has kept, too
        model = self.config.model
        try:
            if source is None:
                checkpoint.begin_anew(self.stages, model.flux, self.info, model.loras)
                self.step = self.since = 0
            else:
                self.step, self.since = checkpoint.load(self.stages, source)
        except BaseException as error:
            if isinstance(error, Damaged) or not isinstance(error, ValueError):
                self.updated = [stage.name for stage in self.stages]  # some of them may be
            raise
        for group in (group for stage in self.stages for group in stage.arena.groups):
            group.spec = replace(group.spec, since=self.since)
        self.updated = []

    def entries(self, dtype: str, *, ema: bool = False) -> list[Entry]:
        """The weights under their file names, for ``weights.write_safetensors``: exact masters, cast to ``dtype``.

        ``ema``: their running averages; ``ValueError`` where the run keeps none.
        """
        self.check_average(ema)
        self.conveyor.streams.synchronize()
        return checkpoint.export_entries(self.stages, dtype, ema=ema)

    def usage(self) -> dict[str, Any]:
        """GiB in use now, and what the steps since this was asked last waited for: cheap, and waits for nothing.

        ``vram_gb``, ``ram_gb``; ``waits``: seconds a step for which the arithmetic stood still for copies ``up`` and
        ``down``; ``waits_for``: the longer of them if it took a tenth of the time or more, else ``arithmetic``.
        """
        on_gpu = self.device.type == "cuda"
        waited, (step, seconds) = self.conveyor.streams.waited(), self._asked
        self._asked = self.step, self.seconds
        longest, spent = max(waited, key=lambda name: waited[name]), self.seconds - seconds
        return {
            "vram_gb": round(torch.cuda.memory_reserved(self.device) / GIB, 2) if on_gpu else 0.0,
            "ram_gb": round(resident_ram() / GIB, 2),
            "waits": {name: round(wait / max(self.step - step, 1), 3) for name, wait in waited.items()},
            "waits_for": longest if waited[longest] > WAITING * spent else "arithmetic",
        }

    def check_average(self, wanted: bool) -> None:
        """Raise ``ValueError`` if a running average is ``wanted`` and there is none."""
        if wanted and not self.config.recipe.ema_decay:
            raise ValueError("this run keeps no average of its weights: set ema_decay in its recipe and train on")

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
            return c.model.flux, o.kind, o.state_format, o.weight_precision, c.memory, c.recipe.ema_decay > 0

        if kept(old) != kept(new):
            return False
        data = Dataset(dataset, self._run_dir)
        spec = spec_from_config(new.optimizer, new.recipe.training_seed, new.recipe.ema_decay)
        self.park()
        same = old.recipe.batch_size == new.recipe.batch_size and set(self.data.shapes) == set(data.shapes)
        self.config, self.data = new, data
        self._settle(plan or (self.plan if same else self._resolve()))
        self.stages[-1].run = run_head(self.model, new.recipe)
        for stage in self.stages:
            for group in stage.arena.groups:
                own = {"state_format": group.spec.state_format, "compile": group.spec.compile, "since": self.since}
                group.spec = replace(spec, **own)
        return True

    def compiled(self, wanted: bool | None = None) -> bool:
        """Whether updates run through the compiler; ``wanted``: have them do so, or not."""
        groups = [group for stage in self.stages for group in stage.arena.groups]
        if wanted is not None:
            for group in groups:
                group.spec = replace(group.spec, compile=wanted)
        return any(group.spec.compile for group in groups)

    def _resolve(self, **memory: Any) -> Plan:
        """The plan for this run, with some of its memory settings changed, on the device as it is now."""
        config = replace(self.config, memory=replace(self.config.memory, **memory))
        found = this_machine(config.memory.device, config.memory.reserve_vram_gb, now=True, folder=self._run_dir)
        if self.stages:  # what is free of the RAM is no matter to an engine that has its own
            found = replace(found, ram_now=None)
        return resolve(config, self.info, self.data.shapes, found)

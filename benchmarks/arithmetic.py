"""The arithmetic of a step alone, on the real engine: what everything else is measured against."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from trainer.loop import Trainer
from trainer.walk import walk_back, walk_out


@contextlib.contextmanager
def stopwatch(device: torch.device, into: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the block, all its work on the device included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    into[name] = into.get(name, 0.0) + time.perf_counter() - started


def arithmetic(trainer: Trainer, *, block_by_block: bool) -> dict[str, float]:
    """Seconds of the forward and the backward pass alone: all weights on the device, no updates."""
    size = trainer.config.recipe.batch_size
    samples = list(range(size))
    micros = trainer._micro_batches(samples, [0.5] * size, [("arithmetic", i) for i in samples], train=False)
    *body, head = trainer.stages
    resident, offload = [stage.arena.resident for stage in trainer.stages], trainer.keeper.offload
    trainer.keeper.offload = offload and block_by_block
    trainer.park()
    if not block_by_block:
        for stage in trainer.stages:
            stage.arena.settle(resident=True)
            stage.arena.bring()
    spent: dict[str, float] = {}
    trainer.keeper.clear()
    trainer.conveyor.begin([stage.arena for stage in [*body, head, *reversed(body)]])
    if block_by_block:
        for stage in body:
            stage.arena.bring()
            with stopwatch(trainer.device, spent, "forward"):
                walk_out(trainer.conveyor.visit, [stage], micros, trainer.keeper)
    else:
        with stopwatch(trainer.device, spent, "forward"):
            walk_out(trainer.conveyor.visit, body, micros, trainer.keeper)
    watch = stopwatch(trainer.device, spent, "backward") if not block_by_block else contextlib.nullcontext()
    with watch:
        for stage in [head, *reversed(body)]:
            stage.arena.bring()
            part = stopwatch(trainer.device, spent, "backward") if block_by_block else contextlib.nullcontext()
            with part, trainer.conveyor.visit(stage.arena):
                for m in reversed(micros):
                    with trainer._inputs(stage, m) as inputs:
                        walk_back(stage, m, inputs, add=m is not micros[-1])
    trainer.park()
    for stage, was in zip(trainer.stages, resident, strict=True):
        stage.arena.settle(resident=was)
    trainer.keeper.offload = offload
    return spent

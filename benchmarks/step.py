"""What a step takes, on the real engine: random weights made on the device, no file read.

``python -m benchmarks.step --preset flux-dev --vram-cap 32 --batch 5 --resolution 1024 --steps 4 --json``

The last line is one JSON object. ``floor_seconds`` is ``max(C_forward, up_forward) + max(C_backward, up_backward,
down_backward)``: C is the arithmetic alone, measured on the same engine with all weights on the device and no updates
(block by block where the card is too small), and the copies are what a step moves at the bandwidth measured both ways
at once. ``ratio_to_floor`` and ``ratio_to_arithmetic`` are of the median step. Without a GPU nothing is copied.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.cli.plan import BETAS
from trainer.config import (
    AUTO,
    OPTIMIZERS,
    STATE_FORMATS,
    WEIGHT_PRECISIONS,
    MemoryConfig,
    OptimizerConfig,
    RecipeConfig,
)
from trainer.flux.model import PRESETS
from trainer.loop import Trainer
from trainer.memory import machine, plan, timing
from trainer.memory.checks import copy_speeds, peak_rss
from trainer.memory.streams import DOWN, UP, BlockingStreams, CudaStreams, Streams

from .arithmetic import arithmetic
from .random_run import TEXT_TOKENS, RandomData, random_run

GIB = machine.GIB


def watching(base: type[Streams]) -> Any:
    """``base``, counting what it copies."""

    class Watching(base):  # type: ignore[misc,valid-type]
        device: torch.device

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.bytes = {UP: 0, DOWN: 0}

        def copy(self, stream: str, target: Tensor, source: Tensor) -> None:
            self.bytes[stream] += target.nbytes
            super().copy(stream, target, source)

        def start(self) -> None:
            self.bytes = {UP: 0, DOWN: 0}
            self.waited()

    return Watching


def run_steps(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    """Figures of each step."""
    streams: Any = trainer.conveyor.streams
    work = _work(trainer)
    flop = sum(work.forward) + sum(work.backward)
    found = []
    for _ in range(steps):
        streams.synchronize()
        streams.start()
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.device)
        started = time.perf_counter()
        report = trainer.train_step()
        streams.synchronize()
        seconds = time.perf_counter() - started
        vram = torch.cuda.max_memory_reserved(trainer.device) if trainer.device.type == "cuda" else 0
        found.append({
            "seconds": seconds,
            "tflops": flop / seconds / 1e12,
            "waited_seconds": sum(streams.waited().values()),
            "gb_up": streams.bytes[UP] / 1e9,
            "gb_down": streams.bytes[DOWN] / 1e9,
            "peak_vram_gb": vram / GIB,
            "peak_rss_gb": peak_rss() / GIB,
            "loss": report.loss,
        })  # fmt: skip
    return found


def _work(trainer: Trainer) -> timing.StepWork:
    from trainer.memory.footprint import stage_sizes

    assert trainer.info.flux is not None and isinstance(trainer.data, RandomData)
    h, w = trainer.data.shapes[0]
    stages = stage_sizes(trainer.info.flux, trainer.config.optimizer, ema=trainer.config.recipe.ema_decay > 0)
    return timing.step_work(
        trainer.info.flux, stages, swap=trainer.plan.blocks_to_swap,
        offload=trainer.plan.activation_offload, pictures=trainer.config.recipe.batch_size,
        tokens=-(-h // 2) * -(-w // 2) + trainer.data.text_tokens,
        text=trainer.data.text_tokens,
    )  # fmt: skip


def floor(alone: dict[str, float], gb: dict[str, float], speeds: dict[str, float]) -> float:
    """See the module. ``gb``: moved up on the way out and back, and down on the way back."""
    up, down = speeds.get("h2d_both", 0.0), speeds.get("d2h_both", 0.0)
    if not (up and down):
        return alone["forward"] + alone["backward"]
    return max(alone["forward"], gb["up_forward"] / up) + max(
        alone["backward"], gb["up_backward"] / up, gb["down_backward"] / down
    )


def moved(trainer: Trainer) -> dict[str, float]:
    """GB that a step has to move on its way out and back, from sizes: states and weights for the way back go then."""
    work = _work(trainer)
    stages, swap = work.stages, work.swap
    weights = sum(s.weight for s in stages.body[:swap])
    slots, _ = stages.slots(swap, True)
    states, kept = sum(stages.storage.values()), work.kept * len(stages.body)
    return {
        "up_forward": (weights - slots) / 1e9,
        "up_backward": (weights - slots + states + kept) / 1e9,
        "down_backward": (weights + states) / 1e9,
    }


def summary(steps: list[dict[str, float]], alone: dict[str, float], least: float) -> dict[str, Any]:
    """Medians of all but the first step, and their ratios."""
    counted = steps[1:] or steps
    seconds = statistics.median(s["seconds"] for s in counted)
    whole = alone["forward"] + alone["backward"]
    return {
        "step_seconds": seconds,
        "tflops": statistics.median(s["tflops"] for s in counted),
        "waited_seconds": statistics.median(s["waited_seconds"] for s in counted),
        "gb_up": counted[-1]["gb_up"],
        "gb_down": counted[-1]["gb_down"],
        "peak_vram_gb": max(s["peak_vram_gb"] for s in steps),
        "peak_rss_gb": max(s["peak_rss_gb"] for s in steps),
        "arithmetic_seconds": whole,
        "floor_seconds": least,
        "ratio_to_floor": seconds / least,
        "ratio_to_arithmetic": seconds / whole,
    }


def use_streams(trainer: Trainer, streams: Streams) -> None:
    """Go on with other streams and with memory made anew by them."""
    trainer.park()
    conveyor = trainer.conveyor
    conveyor.streams.unpin()
    for place in (conveyor, conveyor.host, conveyor.device, trainer.keeper):
        place.streams = streams
    gc.collect()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    optimizer = OptimizerConfig(
        kind=args.optimizer,
        betas=BETAS[args.optimizer],
        state_format=args.state_format,
        weight_precision=args.weight_precision,
    )
    memory = MemoryConfig(blocks_to_swap=args.swap, micro_batch=args.micro_batch,
                          activation_offload=args.activation_offload, device=args.device)  # fmt: skip
    limits = machine.this_machine(args.device, memory.reserve_vram_gb, now=True)
    on_gpu = limits.device != "cpu"
    if args.vram_cap and on_gpu:
        total = torch.cuda.get_device_properties(limits.device).total_memory
        capped = machine.given(args.vram_cap, 1.0, reserve_vram_gb=memory.reserve_vram_gb).vram_free
        limits = dataclasses.replace(limits, vram_free=min(limits.vram_free, capped))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kind = watching(CudaStreams if on_gpu else Streams)
        device = torch.device(limits.device)
        trainer = random_run(
            args.preset, Path(folder), resolution=args.resolution, optimizer=optimizer, memory=memory, limits=limits,
            recipe=RecipeConfig(batch_size=args.batch, ema_decay=0.999 if args.ema else 0.0),
            text_tokens=args.text_tokens, streams=kind(device) if on_gpu else kind(),
        )  # fmt: skip
        setup = time.perf_counter() - started
        if args.vram_cap and on_gpu:
            torch.cuda.set_per_process_memory_fraction(min(args.vram_cap * GIB / total, 1.0), limits.device)
        if on_gpu:
            trainer.warm_up()  # the updates are compiled here
        steps = run_steps(trainer, args.steps)
        trainer.park()
        speeds = copy_speeds(device) if on_gpu else {}
        if args.vram_cap and on_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0, limits.device)
        roomy = not on_gpu or torch.cuda.mem_get_info(device)[0] > _all_resident(trainer)
        for _ in range(2):  # the first one warms up
            alone = arithmetic(trainer, block_by_block=not roomy)
        result = {
            "preset": args.preset, "device": str(device), "batch": args.batch, "resolution": args.resolution,
            "optimizer": args.optimizer, "state_format": args.state_format, "weight_precision": args.weight_precision,
            "ema": args.ema,
            "blocks_to_swap": trainer.plan.blocks_to_swap, "activation_offload": trainer.plan.activation_offload,
            "vram_cap_gb": args.vram_cap, "planned_vram_gb": trainer.plan.vram_gb,
            "planned_ram_gb": trainer.plan.ram_gb,
            "setup_seconds": setup, "arithmetic_block_by_block": not roomy, "copy_speeds": speeds,
            "forward_seconds": alone["forward"], "backward_seconds": alone["backward"],
            **summary(steps, alone, floor(alone, moved(trainer), speeds)), "steps": steps,
        }  # fmt: skip
        if args.baseline == "blocking":
            blocking = watching(BlockingStreams)(device) if on_gpu else watching(Streams)()
            if args.vram_cap and on_gpu:
                torch.cuda.set_per_process_memory_fraction(min(args.vram_cap * GIB / total, 1.0), limits.device)
            use_streams(trainer, blocking)
            slow = run_steps(trainer, max(2, args.steps // 2))
            result["blocking_step_seconds"] = statistics.median(s["seconds"] for s in slow[1:])
            result["gain_over_blocking"] = result["blocking_step_seconds"] / result["step_seconds"]
    return result


def _all_resident(trainer: Trainer) -> int:
    limits = machine.Machine("cuda:0", 1 << 60, 1 << 60)
    config = dataclasses.replace(
        trainer.config, memory=dataclasses.replace(trainer.config.memory, blocks_to_swap=0, activation_offload="off")
    )
    return int(plan.resolve(config, trainer.info, trainer.data.shapes, limits).vram_gb * GIB)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--preset", choices=tuple(PRESETS), default="tiny")
    p.add_argument("--batch", type=int, default=5)
    p.add_argument("--resolution", type=int, default=1024, help="side of the pictures in pixels")
    p.add_argument("--text-tokens", type=int, default=TEXT_TOKENS)
    p.add_argument("--swap", type=int, default=AUTO, help="blocks that wait in host memory; -1: as few as fit")
    p.add_argument("--activation-offload", choices=("auto", "on", "off"), default="auto")
    p.add_argument("--micro-batch", type=int, default=0)
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="nadam")
    p.add_argument("--state-format", choices=STATE_FORMATS, default="log16")
    p.add_argument("--weight-precision", choices=WEIGHT_PRECISIONS, default="split")
    p.add_argument("--ema", action="store_true", help="with a running average of the weights")
    p.add_argument("--device", default="auto")
    p.add_argument("--vram-cap", type=float, default=0.0, metavar="GB", help="GiB that the process may take on the GPU")
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--baseline", choices=("blocking",), help="the same again with blocking copies of pageable memory")
    p.add_argument("--json", action="store_true", help="print only the last line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    result = measure(args)
    if not args.json:
        for i, step in enumerate(result["steps"], 1):
            sys.stdout.write(f"step {i}: " + ", ".join(f"{k} {v:.4g}" for k, v in step.items()) + "\n")
        sys.stdout.write(f"{result['step_seconds']:.3f} s a step, {result['ratio_to_floor']:.2f} x the floor\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

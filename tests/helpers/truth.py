"""Run as a program in a fresh process: what a run of the 0.3b preset takes of host memory, planned and measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil

PROCESS = psutil.Process()
START = PROCESS.memory_info().rss


def peak() -> int:
    """The most that this process has had in memory, in bytes: the kernel's own mark, which misses no moment."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main(folder: Path) -> None:
    sys.path.insert(0, os.getcwd())
    from benchmarks.step import random_run
    from trainer.config import MemoryConfig, OptimizerConfig, RecipeConfig

    trainer = random_run(
        "0.3b",
        folder,
        resolution=128,
        text_tokens=16,
        optimizer=OptimizerConfig(),
        recipe=RecipeConfig(batch_size=2),
        memory=MemoryConfig(device="cpu", blocks_to_swap=2),
    )
    for _ in range(2):  # the first has no buffers of an earlier one beside what it makes
        trainer.train_step()
    planned = trainer.plan.ram_gb * (1 << 30)
    sys.stdout.write(json.dumps({"planned": planned, "measured": peak() - START, "items": trainer.plan.items}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Run as a program in a fresh process: what a run of the 0.3b preset takes of host memory, planned and measured."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil

PROCESS = psutil.Process()
START = PROCESS.memory_info().rss


def highest(stop: threading.Event, found: list[int]) -> None:
    """The peak of this process's resident memory, looked at every few milliseconds."""
    while not stop.is_set():
        found[0] = max(found[0], PROCESS.memory_info().rss)
        time.sleep(0.002)


def main(folder: Path) -> None:
    sys.path.insert(0, os.getcwd())
    from benchmarks.step import random_run
    from trainer.config import MemoryConfig, OptimizerConfig, RecipeConfig

    stop, found = threading.Event(), [0]
    watcher = threading.Thread(target=highest, args=(stop, found))
    watcher.start()
    trainer = random_run(
        "0.3b",
        folder,
        resolution=128,
        text_tokens=16,
        optimizer=OptimizerConfig(),
        recipe=RecipeConfig(batch_size=2),
        memory=MemoryConfig(device="cpu", blocks_to_swap=2),
    )
    trainer.train_step()
    stop.set()
    watcher.join()
    planned = trainer.plan.ram_gb * (1 << 30)
    sys.stdout.write(json.dumps({"planned": planned, "measured": found[0] - START, "items": trainer.plan.items}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What saving costs: a save point beside a plain copy, with fsync, of as many bytes to the same disk.

``python -m benchmarks.save --json``. Both write in turn, the disk quiet before each; ``ratio`` is the median of the
copy's seconds over the save's (above 1: saving is the faster). The copy reads files that were just read, so from
memory where there is room, as the save does. ``extra_ram_mb`` is the most that a save, a checkpoint or a load takes
beside the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.step import random_run
from trainer.config import OPTIMIZERS, STATE_FORMATS, WEIGHT_PRECISIONS, MemoryConfig, OptimizerConfig, RecipeConfig
from trainer.files import CHUNK_BYTES
from trainer.flux.model import PRESETS
from trainer.loop import Trainer
from trainer.saves.savepoints import Source, verify, write_save_point
from trainer.saves.weights_only import write_checkpoint

UID = "benchmark"
CLEAR = Path("/proc/self/clear_refs")


def engine(folder: Path, preset: str, device: str, optimizer: OptimizerConfig) -> Trainer:
    """An engine whose memory is all in use: states that nobody has touched would cost neither RAM nor reading."""
    recipe = RecipeConfig(batch_size=1)
    trainer = random_run(preset, folder, resolution=64, optimizer=optimizer, recipe=recipe, text_tokens=8,
                         memory=MemoryConfig(device=device))  # fmt: skip
    pattern = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for group in (group for stage in trainer.stages for group in stage.arena.groups):
        for tensor in group.storage.values():
            for part in tensor.view(-1).view(torch.uint8).split(len(pattern)):
                part.copy_(pattern[: len(part)])
    return trainer


def extra_ram(work: Callable[[], object]) -> int:
    """Bytes of host memory that ``work()`` takes beside what the process holds already, at most."""
    before = psutil.Process().memory_info().rss
    if CLEAR.exists():  # Linux keeps the peak, and lets it be set back
        CLEAR.write_text("5")
        work()
        return max(0, _peak_kib() * 1024 - before)
    seen, done = [before], threading.Event()

    def look() -> None:
        while not done.wait(0.002):
            seen.append(psutil.Process().memory_info().rss)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(seen) - before


def _peak_kib() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1])


def copy(source: Path, target: Path) -> None:
    """A plain copy of a folder of files, on the disk when it returns."""
    target.mkdir()
    buffer = bytearray(CHUNK_BYTES)
    for path in sorted(source.iterdir()):
        with open(path, "rb", buffering=0) as read, open(target / path.name, "wb", buffering=0) as written:
            while count := read.readinto(buffer):
                written.write(memoryview(buffer)[:count])
    for path in target.iterdir():
        with open(path, "r+b") as written:
            os.fsync(written.fileno())


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work()`` takes on a disk that has nothing else to write."""
    if hasattr(os, "sync"):
        os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(trainer: Trainer, folder: Path, rounds: int) -> dict[str, Any]:
    """Speeds in GB/s, and memory in MB."""
    state, trainer.step = folder / "state", 1
    made: list[Source] = []

    def save() -> None:
        made.append(write_save_point(state, UID, trainer.step, trainer.save))

    def checkpoint() -> None:
        write_checkpoint(folder, UID, UID, trainer.step, trainer.entries("bf16"), {})

    ram = {"save": extra_ram(save), "checkpoint": extra_ram(checkpoint)}
    size = sum(path.stat().st_size for path in made[0].path.iterdir())
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    seconds: dict[str, list[float]] = {name: [] for name in ("save", "copy", "checkpoint", "load")}
    for _ in range(rounds):
        verify(made[-1].path)
        seconds["copy"].append(timed(lambda: copy(made[-1].path, folder / "copy")))
        shutil.rmtree(folder / "copy")
        shutil.rmtree(state)
        seconds["save"].append(timed(save))
        seconds["checkpoint"].append(timed(checkpoint))
        seconds["load"].append(timed(lambda: trainer.load(made[-1])))
    ram["load"] = extra_ram(lambda: trainer.load(made[-1]))
    shutil.rmtree(state)
    speeds = {f"{name}_gb_s": (weights if name == "checkpoint" else size) / statistics.median(taken) / 1e9
              for name, taken in seconds.items()}  # fmt: skip
    ratios = [copied / saved for copied, saved in zip(seconds["copy"], seconds["save"], strict=True)]
    memory = {f"{name}_ram_mb": taken / 1e6 for name, taken in ram.items()}
    return {"ratio": statistics.median(ratios), "gb": size / 1e9, **speeds, **memory,
            "extra_ram_mb": max(ram.values()) / 1e6}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the last line")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="0.3b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write: on the disk that is to be measured (the system's for such)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="nadam")
    parser.add_argument("--state-format", choices=STATE_FORMATS, default="log16")
    parser.add_argument("--weight-precision", choices=WEIGHT_PRECISIONS, default="split")
    args = parser.parse_args(arguments)
    betas = (0.9, 0.999) if args.optimizer == "nadam" else (0.98, 0.92, 0.99)
    optimizer = OptimizerConfig(kind=args.optimizer, betas=betas, state_format=args.state_format,
                                weight_precision=args.weight_precision)  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        found = measure(engine(Path(made), args.preset, args.device, optimizer), Path(made), args.rounds)
    if not args.json:
        sys.stdout.write(f"saved {found['save_gb_s']:.2f} GB/s, copied {found['copy_gb_s']:.2f} GB/s, extra RAM"
                         f" {found['extra_ram_mb']:.0f} MB\n")  # fmt: skip
    told = {"preset": args.preset, "optimizer": args.optimizer, "state_format": args.state_format,
            "weight_precision": args.weight_precision}  # fmt: skip
    sys.stdout.write(json.dumps({**found, **told}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

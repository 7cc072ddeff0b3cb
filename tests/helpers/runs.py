"""Run directories without an engine, and other processes that have them open."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.config import DatasetConfig, ModelConfig, RunConfig
from trainer.run import RunDirectory

PACK = Path(__file__).resolve().parents[2]
SAMPLE = {"image": "a.png", "latent": "a", "shape": [8, 8], "caption": "a"}
MANIFEST = {"format": 1, "cache": "cache", "samples": [SAMPLE], "empty_caption": "", "fingerprint": "f"}


def config_for(folder: Path, **changes) -> RunConfig:
    model = ModelConfig(flux=str(folder / "flux.safetensors"), vae="/models/vae.safetensors")
    config = RunConfig(name="run", model=model, dataset=DatasetConfig(folder=str(folder / "pictures")))
    return dataclasses.replace(config, **changes)


def empty_run(folder: Path) -> RunDirectory:
    return RunDirectory.create(folder, config_for(folder), MANIFEST)


def python(code: str, *args: object, **options) -> subprocess.Popen:
    """Another process, with the pack at hand."""
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=PACK, stdout=subprocess.PIPE, text=True,
                            **options)


HOLD = """
import sys, time
from trainer.run import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    (RunDirectory(sys.argv[1]).address_file).write_text("{}")
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def held_open(run: RunDirectory) -> Iterator[subprocess.Popen]:
    """Another process that has the run open, as a worker would."""
    process = python(HOLD, run.path)
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def walk(run: RunDirectory, *states: str) -> None:
    for state in states:
        run.transition(state)


def record(run: RunDirectory, steps, loss: float) -> None:
    for step in steps:
        run.append("step", step=step, loss=loss, lr=1e-3, seconds=2.0)


def save(run: RunDirectory, step: int, text: str = "x", keep: int = 1):
    def write(folder: Path) -> None:
        (folder / "a.bin").write_text(text)
        (folder / "b").mkdir()
        (folder / "b" / "c.bin").write_text(text * 2)

    return run.write_save_point(step, write, keep)


def names(run: RunDirectory) -> list[str]:
    return sorted(os.listdir(run.path / "state"))

"""What an export takes of the RAM, at FLUX.1's width: it must fit beside a training that fills the machine."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import write_flux
from trainer.flux.model import FluxParams

ROOT = Path(__file__).parents[2]

EXPORTS = """
import dataclasses, json, sys, threading
from pathlib import Path
import psutil, torch
from tests.conftest import write_manifest
from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RunConfig
from trainer.export.write import ExportOptions, export
from trainer.flux.model import FluxParams
from trainer.loop import Trainer
from trainer.run import RunDirectory

folder = Path(sys.argv[1])
wide = dataclasses.replace(FluxParams(), depth=1, depth_single_blocks=1)
flux = folder / "flux.safetensors"
optimizer = OptimizerConfig(state_format="int8", weight_precision="nearest")
config = RunConfig(name="wide", model=ModelConfig(flux=str(flux)), dataset=DatasetConfig(folder=str(folder)),
                   optimizer=optimizer, memory=MemoryConfig(device="cpu"))
run = RunDirectory.create(folder / "wide", config, write_manifest(folder / "wide", [(8, 8)], wide))
trainer = Trainer(config, run.path, dataset=run.dataset)
for stage in trainer.stages:  # as if trained: with changes of full rank
    for group in stage.arena.groups:
        for part in group.home["weight"].split(1 << 22):
            part.add_(0.01 * part.roll(1))
assert sum(p.numel() for p in trainer.model.parameters()) > 0.54e9

process = psutil.Process()
before = peak = process.memory_info().rss
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, process.memory_info().rss)

watcher = threading.Thread(target=watch)
watcher.start()
size = export(run, folder / "out.safetensors", ExportOptions(**json.loads(sys.argv[2])), trainer=trainer)["bytes"]
done.set()
watcher.join()
print(json.dumps([peak - before, size]))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Flux of 0.55 billion parameters."""
    folder = tmp_path_factory.mktemp("wide")
    params = dataclasses.replace(FluxParams(), depth=1, depth_single_blocks=1)
    write_flux(folder / "flux.safetensors", params, dtype=torch.bfloat16)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "bound", "size"),
    [({"dtype": "bf16"}, 300, (1090, 1110)), ({"dtype": "fp8"}, 300, (600, 640)), ({"lora_rank": 16}, 700, (8, 12))],
)
def test_an_export_takes_little_memory(wide: Path, options: dict, bound: int, size: tuple[int, int]) -> None:
    """In MB above what the engine takes, in a fresh process. A LoRA holds one matrix of changes in float32 (the widest
    is 264 MB), its factors and, while they are measured, some rows of their product."""
    shutil.rmtree(wide / "wide", ignore_errors=True)
    (wide / "out.safetensors").unlink(missing_ok=True)
    command = [sys.executable, "-c", EXPORTS, str(wide), json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    extra, written = json.loads(done.stdout.splitlines()[-1])
    assert extra < bound * 1e6, f"{extra / 1e6:.0f} MB"
    assert size[0] < written / 1e6 < size[1], f"{written / 1e6:.1f} MB"

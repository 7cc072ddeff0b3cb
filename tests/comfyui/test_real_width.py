"""At FLUX.1's real width: train, export, and load the file with ComfyUI's own loader, old versions included."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfyui.server import PACK, Install
from tests.conftest import write_flux, write_manifest
from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig
from trainer.flux.model import FluxParams, build_meta
from trainer.flux.variants import require_flux
from trainer.run import RunDirectory
from trainer.weights import load_weights_

pytestmark = pytest.mark.slow

WIDE = dataclasses.replace(FluxParams(), depth=1, depth_single_blocks=1)
"""0.55 billion parameters."""

IN_COMFYUI = """
import sys, torch
file, inputs, out = sys.argv[1:4]
sys.argv = sys.argv[:1]
from comfy.cli_args import args
args.cpu = True
import comfy.sd, comfy.model_management
from safetensors.torch import load_file, save_file
patcher = comfy.sd.load_diffusion_model(file, model_options={"dtype": torch.float32})
comfy.model_management.load_models_gpu([patcher])
data = load_file(inputs)
with torch.inference_mode():
    save_file({"out": patcher.model.diffusion_model(**data).contiguous()}, out)
"""


def cli(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *map(str, arguments)], cwd=PACK, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file that was trained, and the export after two steps."""
    folder = tmp_path_factory.mktemp("wide")
    flux = write_flux(folder / "flux.safetensors", WIDE, dtype=torch.bfloat16)
    config = RunConfig(
        name="wide",
        model=ModelConfig(flux=str(flux)),
        dataset=DatasetConfig(folder=str(folder)),
        optimizer=OptimizerConfig(lr=1e-4),
        recipe=RecipeConfig(batch_size=2),
        memory=MemoryConfig(device="cpu"),
    )
    run = RunDirectory.create(folder / "wide", config, write_manifest(folder / "wide", [(8, 8)] * 2, WIDE))
    cli("train", run.path, "--until", 2)
    cli("export", run.path, "--out", folder / "out.safetensors", "--dtype", "bf16")
    return flux, folder / "out.safetensors"


def test_the_export_loads_and_computes_the_same(exported: tuple[Path, Path], install: Install, tmp_path: Path) -> None:
    flux, file = exported
    info = require_flux(file)
    assert info.flux == require_flux(flux).flux and info.dtype == "bf16" and 0.5e9 < info.params < 0.6e9

    ours = build_meta(WIDE, torch.float32).to_empty(device="cpu")
    load_weights_(ours, file)
    g = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(1, 16, 8, 12, generator=g),
        "timestep": torch.tensor([0.6]),
        "context": torch.randn(1, 20, WIDE.context_in_dim, generator=g),
        "y": torch.randn(1, WIDE.vec_in_dim, generator=g),
        "guidance": torch.tensor([3.5]),
    }
    with torch.no_grad():
        expected = ours(inputs["x"], inputs["timestep"], inputs["context"], inputs["y"], inputs["guidance"])
        load_weights_(ours, flux)
        untrained = ours(inputs["x"], inputs["timestep"], inputs["context"], inputs["y"], inputs["guidance"])
    save_file(inputs, tmp_path / "in.safetensors")
    done = subprocess.run(
        [install.python, "-c", IN_COMFYUI, file, tmp_path / "in.safetensors", tmp_path / "out.safetensors"],
        cwd=install.path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    theirs = load_file(tmp_path / "out.safetensors")["out"]
    scale = float(expected.abs().max())
    difference = float((theirs - expected).abs().max()) / scale
    assert difference < 1e-5
    # Two steps at this rate are seen, and not by rounding alone.
    assert float((expected - untrained).abs().max()) / scale > 100 * max(difference, 1e-6)

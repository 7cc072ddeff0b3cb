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
file, inputs, out, lora = sys.argv[1:5]
sys.argv = sys.argv[:1]
from comfy.cli_args import args
args.cpu = True
import comfy.sd, comfy.lora, comfy.model_management
from safetensors.torch import load_file, save_file
patcher = comfy.sd.load_diffusion_model(file, model_options={"dtype": torch.float32})
comfy.model_management.load_models_gpu([patcher])
data = load_file(inputs)
with torch.inference_mode():
    save_file({"out": patcher.model.diffusion_model(**data).contiguous()}, out)
if lora:
    names = comfy.lora.model_lora_keys_unet(patcher.model, {})
    changes = comfy.lora.load_lora(load_file(lora), names)
    assert set(patcher.clone().add_patches(changes, 1.0)) == set(changes)
    print(len(changes), len(list(patcher.model.diffusion_model.parameters())))
"""


def cli(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *map(str, arguments)], cwd=PACK, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file that was trained, and the bf16 export after two steps; beside that, fp8 and a LoRA."""
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
    cli("export", run.path, "--out", folder / "fp8.safetensors", "--dtype", "fp8")
    cli("export", run.path, "--out", folder / "lora.safetensors", "--lora", 4)
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
    theirs, said = in_comfyui(install, file, inputs, tmp_path, file.with_name("lora.safetensors"))
    # Every name of the LoRA is known, and every parameter is in it.
    changed, parameters = map(int, said.stdout.split()[-2:])
    assert changed == parameters > 30 and "not loaded" not in said.stderr.lower()
    scale = float(expected.abs().max())
    difference = float((theirs - expected).abs().max()) / scale
    assert difference < 1e-5
    # Two steps at this rate are seen, and not by rounding alone.
    assert float((expected - untrained).abs().max()) / scale > 100 * max(difference, 1e-6)

    # A weight in fp8 is off by 2.6 %, and so about is what comes out.
    small, said = in_comfyui(install, file.with_name("fp8.safetensors"), inputs, tmp_path)
    assert 0.001 < float((small - expected).norm() / expected.norm()) < 0.1
    assert "unexpected" not in said.stderr
    # 0.3.64 wants a scale for all linear layers, and takes 1 for those that are not fp8.
    assert "missing" not in said.stderr or not install.at_least(0, 9, 0)


def in_comfyui(
    install: Install, file: Path, inputs: dict[str, torch.Tensor], folder: Path, lora: Path | str = ""
) -> tuple[torch.Tensor, subprocess.CompletedProcess]:
    """What ComfyUI's Flux computes with the weights in ``file``, and what it said."""
    save_file(inputs, folder / "in.safetensors")
    arguments = [file, folder / "in.safetensors", folder / "out.safetensors", lora]
    done = subprocess.run(
        [install.python, "-c", IN_COMFYUI, *map(str, arguments)],
        cwd=install.path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "out.safetensors")["out"], done

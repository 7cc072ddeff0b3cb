"""Our Flux against ComfyUI's own, in ComfyUI's interpreter: its module, and its loader on files that we wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.comfyui.server import Install
from trainer.flux.model import TINY, FluxParams, build_meta, init_weights_
from trainer.weights import TensorFile, entry, load_weights_, write_safetensors

TOLERANCE = 1e-5
"""Largest absolute difference in float32, as a share of the output's largest absolute value."""
TWO_HEADS = dataclasses.replace(TINY, hidden_size=256, num_heads=2, depth=2, depth_single_blocks=3)
CASES: dict[str, tuple[FluxParams, str, int, int]] = {
    "dev": (TINY, "F32", 10, 14),
    "schnell": (dataclasses.replace(TINY, guidance_embed=False), "F32", 8, 6),
    "deeper, odd sides": (TWO_HEADS, "F32", 7, 11),
    "bf16 file": (TINY, "BF16", 10, 14),
}
"""Sizes of the model, dtype of its file, height and width of the latent."""

IN_COMFYUI = """
import json, sys
jobs = json.loads(sys.argv[1])
import torch
from comfy.cli_args import args
args.cpu = True
import comfy.ldm.flux.model, comfy.model_management, comfy.ops, comfy.sd
from safetensors.torch import load_file, save_file
for way, file, sizes, inputs, out in jobs:
    if way == "module":
        model = comfy.ldm.flux.model.Flux(**sizes, operations=comfy.ops.disable_weight_init, dtype=torch.float32)
        own = set(model.state_dict())
        weights = {k if k in own else k.removesuffix("scale") + "weight": v for k, v in load_file(file).items()}
        model.load_state_dict(weights, strict=True)
    else:
        patcher = comfy.sd.load_diffusion_model(file, model_options={"dtype": torch.float32})
        comfy.model_management.load_models_gpu([patcher])
        model = patcher.model.diffusion_model
    data = load_file(inputs)
    with torch.inference_mode():
        result = model(data["x"], data["timestep"], data["context"], data["pooled"], data["guidance"])
    save_file({"out": result.contiguous()}, out)
"""


def write_case(folder: Path, params: FluxParams, dtype: str, h: int, w: int) -> torch.Tensor:
    """Write a model whose every part matters, and inputs; return what our module makes of them in float32."""
    generator = torch.Generator().manual_seed(0)
    model = init_weights_(build_meta(params, torch.float32).to_empty(device="cpu"), 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif "mod" in name or name.startswith("final"):
                parameter.mul_(4)
    write_safetensors(folder / "model.safetensors", [entry(n, p, dtype) for n, p in model.named_parameters()])
    load_weights_(model, folder / "model.safetensors")
    data = {
        "x": torch.randn(2, 16, h, w, generator=generator),
        "timestep": torch.tensor([0.15, 0.85]),
        "context": torch.randn(2, 9, params.context_in_dim, generator=generator),
        "pooled": torch.randn(2, params.vec_in_dim, generator=generator),
        "guidance": torch.tensor([1.0, 3.5]),
    }
    write_safetensors(folder / "inputs.safetensors", [entry(k, v) for k, v in data.items()])
    with torch.no_grad():
        return model(**data)


@pytest.fixture(scope="module")
def outputs(install: Install, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple]:
    """For each way and case: our output and ComfyUI's. One process of ComfyUI's interpreter makes them all."""
    jobs, ours = [], {}
    ways = ("module", "loader") if install.at_least(0, 9) else ("module",)
    for case, (params, dtype, h, w) in CASES.items():
        folder = tmp_path_factory.mktemp("case")
        result = write_case(folder, params, dtype, h, w)
        sizes = dataclasses.asdict(params) | {"image_model": "flux", "patch_size": 2}
        sizes |= {"in_channels": 16, "out_channels": 16}
        if install.at_least(0, 9):
            sizes["txt_ids_dims"] = []
        for way in ways:
            out = folder / f"{way}.safetensors"
            jobs.append([way, str(folder / "model.safetensors"), sizes, str(folder / "inputs.safetensors"), str(out)])
            ours[way, case] = (result, out)
    command = [str(install.python), "-c", IN_COMFYUI, json.dumps(jobs)]
    environment = os.environ | {"PYTHONPATH": str(install.path)}
    done = subprocess.run(command, cwd=install.path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for key, (result, out) in ours.items():
        with TensorFile(out) as file:
            found[key] = result, file.load("out")
    return found


def difference(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    ours, theirs = pair
    assert ours.shape == theirs.shape and theirs.abs().max() > 0.1
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_our_flux_is_comfyui_s_module(outputs: dict, case: str) -> None:
    assert difference(outputs["module", case]) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_comfyui_loads_a_narrow_flux_by_itself(install: Install, outputs: dict, case: str) -> None:
    """The claim of ``TINY``'s docstring: an unmodified ComfyUI reads the sizes from the file."""
    if not install.at_least(0, 9):
        pytest.skip("ComfyUI before 0.9 knows Flux at its full width only")
    assert difference(outputs["loader", case]) < TOLERANCE

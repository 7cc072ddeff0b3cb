"""Exported files loaded by ComfyUI's own code, in its interpreter: all-in-one checkpoints, and names of LoRAs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from tests.comfyui.server import Install
from tests.conftest import write_flux, write_manifest
from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RunConfig
from trainer.export.write import ExportOptions, export
from trainer.flux.model import TINY
from trainer.loop import Trainer
from trainer.run import RunDirectory

HEAD = """
import json, sys, torch
folder = sys.argv[1]
sys.argv = sys.argv[:1]
from comfy.cli_args import args
args.cpu = True
import comfy.sd, comfy.taesd.taesd, comfy.text_encoders.flux, comfy.supported_models_base
from safetensors.torch import load_file, save_file
SIZES = {"clip_l_model_config": {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
                                 "num_hidden_layers": 2},
         "t5xxl_model_config": {"d_model": 96, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}}

def empty_clip(dtype_t5):
    target = comfy.supported_models_base.ClipTarget(comfy.text_encoders.flux.FluxTokenizer,
                                                    comfy.text_encoders.flux.flux_clip(dtype_t5=dtype_t5))
    return comfy.sd.CLIP(target, model_options=SIZES)
"""
"""ComfyUI's text encoders at a size that fits a test: their classes, names and tokenizers are the real ones."""

MAKE = HEAD + """
clip = empty_clip(torch.float32)
g = torch.Generator().manual_seed(0)
random = lambda sd: {k: torch.randn(v.shape, generator=g) * (0.05 if v.ndim > 1 else 1) for k, v in sd.items()}
parts = {"clip_l": clip.cond_stage_model.clip_l.transformer.state_dict(),
         "t5": clip.cond_stage_model.t5xxl.transformer.state_dict(),
         "vae": comfy.taesd.taesd.TAESD(latent_channels=16).state_dict()}
for name, sd in parts.items():
    sd = {k: v for k, v in sd.items() if v.is_floating_point()}
    save_file({k: v.to(torch.bfloat16 if name == "t5" else torch.float32).contiguous()
               for k, v in random(sd).items()}, f"{folder}/{name}.safetensors")
"""

LOAD = HEAD + """
import functools
import folder_paths, nodes
folder_paths.folder_names_and_paths["checkpoints"] = ([folder], {".safetensors"})
plain = comfy.sd.load_checkpoint_guess_config
comfy.sd.load_checkpoint_guess_config = functools.partial(plain, te_model_options=SIZES)
told = {}
for name in ("bf16", "fp8"):
    model, clip, vae = nodes.CheckpointLoaderSimple().load_checkpoint(f"all_{name}.safetensors")[:3]
    alone = comfy.sd.load_diffusion_model(f"{folder}/alone_{name}.safetensors")
    texts = empty_clip(torch.bfloat16)
    for part in ("clip_l", "t5"):
        assert not texts.load_sd(load_file(f"{folder}/{part}.safetensors"))[1]
    other = comfy.sd.VAE(sd=load_file(f"{folder}/vae.safetensors"))
    def same(a, b):
        return bool(torch.equal(a, b)) and bool(torch.isfinite(a).all()) and float(a.float().std()) > 0
    with torch.no_grad():
        encoded = [c.encode_from_tokens(c.tokenize("a red circle"), return_pooled=True) for c in (clip, texts)]
        x = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))
        inputs = {"x": x, "timestep": torch.tensor([0.5]), "context": encoded[0][0].float(),
                  "y": encoded[0][1].float(), "guidance": torch.tensor([3.5])}
        velocities = []
        for m in (model, alone):
            comfy.model_management.load_models_gpu([m])
            dtype = m.model.get_dtype_inference() if hasattr(m.model, "get_dtype_inference") else m.model.get_dtype()
            cast = {k: v.to(dtype) for k, v in inputs.items()}
            velocities.append(m.model.diffusion_model(**cast).float())
        told[name] = {"context": same(encoded[0][0], encoded[1][0]), "pooled": same(encoded[0][1], encoded[1][1]),
                      "velocity": same(*velocities), "pictures": same(vae.decode(x), other.decode(x))}
print(json.dumps(told))
"""


def inside(install: Install, code: str, folder: Path) -> subprocess.CompletedProcess:
    done = subprocess.run([install.python, "-c", code, folder], cwd=install.path, capture_output=True, text=True,
                          timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_an_all_in_one_checkpoint_gives_all_its_parts(install: Install, tmp_path: Path) -> None:
    if not install.at_least(0, 9, 0):
        pytest.skip("ComfyUI before 0.9 hard-codes Flux's width, so it cannot load the tiny one")
    inside(install, MAKE, tmp_path)
    flux = write_flux(tmp_path / "flux.safetensors", dataclasses.replace(TINY, context_in_dim=96, vec_in_dim=64))
    files = {name: str(tmp_path / f"{name}.safetensors") for name in ("clip_l", "t5", "vae")}
    config = RunConfig(name="run", model=ModelConfig(flux=str(flux), **files), memory=MemoryConfig(device="cpu"),
                       dataset=DatasetConfig(folder=str(tmp_path)), optimizer=OptimizerConfig(lr=1e-3))
    params = dataclasses.replace(TINY, context_in_dim=96, vec_in_dim=64)
    run = RunDirectory.create(tmp_path / "run", config, write_manifest(tmp_path / "run", [(8, 8)] * 3, params))
    trainer = Trainer(config, run.path, dataset=run.dataset)
    trainer.train_step()
    for dtype in ("bf16", "fp8"):
        export(run, tmp_path / f"alone_{dtype}.safetensors", ExportOptions(dtype=dtype), trainer=trainer)
        export(run, tmp_path / f"all_{dtype}.safetensors", ExportOptions(dtype=dtype, all_in_one=True), trainer=trainer)
    done = inside(install, LOAD, tmp_path)
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told == {dtype: dict.fromkeys(("context", "pooled", "velocity", "pictures"), True) for dtype in told}
    assert set(told) == {"bf16", "fp8"}
    for word in ("clip missing", "unet missing", "unet unexpected"):
        assert word not in done.stderr, done.stderr[-2000:]

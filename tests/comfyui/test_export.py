"""Every kind of exported file in ComfyUI's own loaders: sampled at the same noise as the run itself.

Distances are root mean squares of latents after 4 steps, over that of the run's own latent. What is asked of each:

- f32: 1e-3 at most, per number; only the order of sums differs.
- bf16: 1 %. A weight is off by 0.1 % (half of its last bit of 8, rms); measured 0.3 %. f16 has three bits more.
- fp8: 10 %. A weight is off by 2.6 % (4 bits), 16 times that of bf16; measured 3.5 %, 12 times.
- a LoRA of full rank: 1 % of the run and of the bf16 file, since its numbers are bf16; measured 0.1 %.

The parent is 127 % off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.comfyui.graphs import demo, sample, train
from tests.comfyui.server import Graph, Server

STEPS = 120
"""Far enough for the parent's pictures to be quite others."""
BOUNDS = {"f32": 1e-5, "bf16": 0.01, "f16": 0.01, "fp8": 0.1, "lora": 0.01}


def latent(server: Server, node: str, result: Any) -> torch.Tensor:
    file = result.outputs[node]["latents"][0]
    return load_file(server.base / "output" / file["subfolder"] / file["filename"])["latent_tensor"].float()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def exported(server: Server) -> Iterator[dict[str, torch.Tensor]]:
    """All kinds of files of one run, and the latents of the run itself, of its parent, and of each file."""
    if not server.install.at_least(0, 9, 0):
        pytest.skip("ComfyUI before 0.9 hard-codes Flux's width, so it cannot load the tiny one")
    g = Graph()
    parts = demo(g)
    last = train(g, parts, "files", STEPS)
    for dtype in ("f32", "bf16", "f16", "fp8"):
        last = g.add("FluxFFTExport", run=last, filename=f"{{run}}_{dtype}", dtype=dtype, overwrite=False)
    last = g.add("FluxFFTExport", run=last, filename="full", dtype="bf16", overwrite=False, lora_rank=128)
    last = g.add("FluxFFTExport", run=last, filename="small", dtype="bf16", overwrite=False, lora_rank=16)
    _, proxy = sample(g, g.add("FluxFFTRunModel", run=last), parts.clip, "proxy")
    result = server.run(g, seconds=600)
    assert not result.error, result.error
    assert all("Wrote" in result.text(key) for key, node in g.items() if node["class_type"] == "FluxFFTExport")
    assert "% of the change" in result.text(str(last))
    found = {"run": latent(server, proxy, result)}
    models = server.base / "models/diffusion_models"
    (models / "parent.safetensors").write_bytes((server.home / "demo/flux_demo.safetensors").read_bytes())
    for name in ("parent", "f32", "bf16", "f16", "fp8", "lora", "small"):
        g = Graph()
        kept = {"f32": "files_f32", "bf16": "files_bf16", "f16": "files_f16", "fp8": "files_fp8"}.get(name, "parent")
        model = g.add("UNETLoader", unet_name=f"{kept}.safetensors", weight_dtype="default")
        if name in ("lora", "small"):
            file = "full" if name == "lora" else "small"
            model = g.add("LoraLoaderModelOnly", model=model, lora_name=f"{file}.safetensors", strength_model=1.0)
        _, saved = sample(g, model, demo(g).clip, name)
        result = server.run(g)
        assert not result.error, result.error
        found[name] = latent(server, saved, result)
    yield found


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_file_samples_as_the_run_does(exported: dict[str, torch.Tensor], kind: str) -> None:
    wanted = exported["run"]
    near, far = distance(exported[kind], wanted), distance(exported["parent"], wanted)
    assert near <= BOUNDS[kind]
    assert far >= 10 * near
    if kind == "f32":
        assert float((exported[kind] - wanted).abs().max()) < 1e-3
    if kind == "lora":
        assert distance(exported["lora"], exported["bf16"]) <= 0.01
        assert near < distance(exported["small"], wanted) < far, "a rank that keeps less is less like the run"


def test_comfyui_knows_every_name_of_the_files(exported: dict[str, torch.Tensor], server: Server) -> None:
    log = server.log.read_text(encoding="utf-8", errors="replace")
    for word in ("lora key not loaded", "NOT LOADED", "unet unexpected", "unet missing", "left over keys in diffusion"):
        assert word not in log
    assert "Using mixed precision operations" in log, "fp8 was loaded as scaled fp8"

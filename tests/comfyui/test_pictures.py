"""Previews and exports: what is sampled is the weights in training, and a checkpoint holds the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.comfyui.graphs import demo, sample, start, train, with_previews
from tests.comfyui.server import Graph, Server


def latent(server: Server, node: str, result: object) -> torch.Tensor:
    """The latent that a SaveLatent node wrote."""
    file = result.outputs[node]["latents"][0]
    return load_file(server.base / "output" / file["subfolder"] / file["filename"])["latent_tensor"]


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def test_the_proxy_samples_the_weights_as_they_are(server: Server) -> None:
    """Equal bit for bit at the same step, different at another."""
    g = Graph()
    parts = demo(g)
    trained = train(g, parts, "bits", 3)
    sampler, saved = sample(g, g.add("FluxFFTRunModel", run=trained), parts.clip, "bits")
    found = []
    for steps in (3, 3, 5):
        g[trained]["inputs"]["steps"] = steps
        server.forget()
        result = server.run(g)
        assert not result.error
        assert sampler in result.executed
        found.append(latent(server, saved, result))
    assert server.steps("bits") == [1, 2, 3, 4, 5]
    assert torch.isfinite(found[0]).all() and found[0].shape == (1, 16, 8, 8)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_previews_while_training(server: Server) -> None:
    g = Graph()
    settings = with_previews(g, every=3, prompts="a red circle\n\n  a blue star \n")
    trained = train(g, demo(g), "every", 7, previews=settings)

    result = server.run(g)

    assert not result.error
    assert server.steps("every") == [1, 2, 3, 4, 5, 6, 7]
    folder = server.home / "every/samples"
    about = sorted((json.loads(p.read_text()) for p in folder.glob("*.json")), key=lambda a: (a["step"], a["index"]))
    assert [(a["step"], a["index"], a["prompt"]) for a in about] == [
        (3, 0, "a red circle"), (3, 1, "a blue star"), (6, 0, "a red circle"), (6, 1, "a blue star")]
    shown = result.outputs[trained]["images"]
    assert len(shown) == 2, "both pictures of the newest step"
    assert "Pictures of step 6: 1. a red circle; 2. a blue star" in result.text(trained)
    pictures = [pixels(path) for path in sorted(folder.glob("*.png"))]
    assert [p.shape for p in pictures] == [(64, 64, 3)] * 4
    assert not np.array_equal(pictures[0], pictures[2]), "the same prompt and noise at steps 3 and 6"
    for picture, file in zip(pictures[2:], shown, strict=True):
        assert np.array_equal(picture, pixels(server.base / file["type"] / file["subfolder"] / file["filename"]))
    saves = [e for e in server.events("every") if e["type"] == "saved"]
    assert [e["step"] for e in saves] == [7], "a preview is no reason to save tens of GB"

    server.forget()
    again = server.run(g)
    assert "Nothing to train" in again.text(trained)
    assert again.outputs[trained]["images"] == shown, "the newest are shown again"


def test_cancel_while_previews_are_sampled(server: Server) -> None:
    g = Graph()
    settings = with_previews(g, every=2, prompts="a\nb\nc\nd")
    g[settings]["inputs"]["sampling_steps"] = 1000
    trained = train(g, demo(g), "long_previews", 4, previews=settings)
    told: list[bool] = []

    def cancel(message: dict) -> None:
        data = message.get("data") or {}
        if message["type"] == "progress" and data.get("node") == trained and data["value"] >= 2 and not told:
            time.sleep(1.0)
            server.interrupt()
            told.append(True)

    result = server.run(g, on_message=cancel)
    assert result.interrupted
    # It did not wait for the pictures: of those four, of a thousand predictions each, none was kept. (Whether they are
    # those of step 2 or of the target depends on which progress the server tells of.)
    step = server.status("long_previews")["step"]
    assert step in (2, 4) and server.status("long_previews")["state"] in ("paused", "finished")
    assert not list((server.home / "long_previews" / "samples").glob(f"step-{step:06d}*"))


def test_preview_shows_what_was_kept(server: Server) -> None:
    """After the run has moved on, the picture of the earlier step is shown again; without one the error says so."""
    g = Graph()
    parts, settings = demo(g), with_previews(g)
    first = g.add("FluxFFTTrainSteps", run=start(g, parts, "kept"), steps=2)
    early = g.add("FluxFFTPreview", run=first, previews=settings)
    second = g.add("FluxFFTTrainSteps", run=early, steps=2)
    late = g.add("FluxFFTPreview", run=second, previews=settings)
    result = server.run(g)
    assert not result.error
    assert [n for n in result.executed if n in (first, early, second, late)] == [first, early, second, late]
    assert "at step 2, sampled" in result.text(early) and "at step 4, sampled" in result.text(late)

    server.forget()
    repeated = server.run(g)
    assert not repeated.error
    assert early in repeated.executed
    assert "at step 2, shown again" in repeated.text(early)
    assert repeated.outputs[early]["images"] == result.outputs[early]["images"]
    assert server.steps("kept") == [1, 2, 3, 4]

    g[settings]["inputs"]["preview_seed"] = 8
    missing = server.run(g)
    assert missing.error_node == early
    assert "step 4" in missing.error and "step 2" in missing.error and "\n" not in missing.error


def test_a_preview_before_the_first_step(server: Server) -> None:
    g = Graph()
    preview = g.add("FluxFFTPreview", run=start(g, demo(g), "before"), previews=with_previews(g))
    result = server.run(g)
    assert not result.error
    assert "at step 0, sampled" in result.text(preview)
    assert not server.steps("before")


@pytest.mark.parametrize("tied", [True, False])
def test_a_sampler_between_two_trainings(server: Server, tied: bool) -> None:
    name = "tied" if tied else "loose"
    g = Graph()
    parts = demo(g)
    first = g.add("FluxFFTTrainSteps", run=start(g, parts, name), steps=2)
    between, between_saved = sample(g, g.add("FluxFFTRunModel", run=first), parts.clip, f"{name}_2")
    second = g.add("FluxFFTTrainSteps", run=first, steps=2)
    end, end_saved = sample(g, g.add("FluxFFTRunModel", run=second), parts.clip, f"{name}_4")
    if tied:
        g[second]["inputs"]["after"] = between.out(0)

    result = server.run(g)

    if not tied:
        assert result.error_node == between
        assert all(word in result.error for word in ("after", "Open a Run", "step 4", "step 2"))
        assert "\n" not in result.error
        return
    assert not result.error
    order = [n for n in result.executed if n in (first, between, second, end)]
    assert order == [first, between, second, end]
    pictures = {2: latent(server, between_saved, result), 4: latent(server, end_saved, result)}
    assert not torch.equal(pictures[2], pictures[4])
    assert server.run(g).executed == []
    # The labels are true: a run of its own that ends at that step gives the same latent.
    for step, wanted in pictures.items():
        g = Graph()
        parts = demo(g)
        alone = train(g, parts, f"alone_{step}", step)
        _, saved = sample(g, g.add("FluxFFTRunModel", run=alone), parts.clip, f"alone_{step}")
        assert torch.equal(latent(server, saved, server.run(g)), wanted)


def test_an_export_is_the_proxy(server: Server) -> None:
    """The float32 file, loaded by ComfyUI, gives the proxy's latents; the bf16 file loads too."""
    if not server.install.at_least(0, 9, 0):
        pytest.skip("ComfyUI before 0.9 hard-codes Flux's width, so it cannot load the tiny one")
    g = Graph()
    parts = demo(g)
    trained = train(g, parts, "export", 12)
    exact = g.add("FluxFFTExport", run=trained, filename="sub/{run}_{step}", dtype="f32", overwrite=False)
    half = g.add("FluxFFTExport", run=exact, filename="half", dtype="bf16", overwrite=False)
    _, proxy = sample(g, g.add("FluxFFTRunModel", run=half), parts.clip, "proxy")
    result = server.run(g)
    assert not result.error
    wanted = latent(server, proxy, result)

    os.link(server.home / "demo/flux_demo.safetensors", server.base / "models/diffusion_models/untrained.safetensors")
    found = {}
    for name, dtype in (("sub/export_000012", "default"), ("half", "default"), ("untrained", "default")):
        g = Graph()
        model = g.add("UNETLoader", unet_name=f"{name}.safetensors", weight_dtype=dtype)
        _, saved = sample(g, model, demo(g).clip, name.replace("/", "_"))
        result = server.run(g)
        assert not result.error, result.error
        found[name] = latent(server, saved, result)
    far = (found["untrained"] - wanted).abs().max()
    near = (found["sub/export_000012"] - wanted).abs().max()
    assert near < 1e-3
    assert far >= 10 * near
    assert (found["half"] - wanted).abs().max() < far

    with safe_open(server.base / "models/diffusion_models/sub/export_000012.safetensors", "pt") as file:
        about = file.metadata()
    assert about["flux_fft.steps"] == "12"
    assert json.loads(about["flux_fft.recipe"])["optimizer"]["kind"] == "nadam"


def test_export_keeps_what_is_there(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "twice", 1)
    out = g.add("FluxFFTExport", run=trained, filename="twice", dtype="bf16", overwrite=False)
    assert not server.run(g).error
    path = server.base / "models/diffusion_models/twice.safetensors"
    before = path.read_bytes()

    g[trained]["inputs"]["steps"] = 2
    refused = server.run(g)
    assert refused.error_node == out and "twice" in refused.error and "overwrite" in refused.error
    assert path.read_bytes() == before

    g[out]["inputs"]["overwrite"] = True
    assert not server.run(g).error
    assert path.read_bytes() != before


@pytest.mark.parametrize("filename", ["../out", "/etc/out", "a/../../out", "", "..", "x:y"])
def test_export_stays_in_its_folder(server: Server, filename: str) -> None:
    g = Graph()
    trained = train(g, demo(g), "stays", 1)
    out = g.add("FluxFFTExport", run=trained, filename=filename, dtype="bf16", overwrite=False)
    result = server.run(g)
    assert result.error_node == out
    assert "filename" in result.error and "\n" not in result.error


def test_a_lora_is_refused(server: Server) -> None:
    weights = {"lora_A": torch.zeros(2, 64), "lora_B": torch.zeros(128, 2)}
    save_file({f"diffusion_model.img_in.{k}.weight": v for k, v in weights.items()},
              server.base / "models/loras/some.safetensors")
    g = Graph()
    parts = demo(g)
    model = g.add("FluxFFTRunModel", run=train(g, parts, "lora", 1))
    lora = g.add("LoraLoaderModelOnly", model=model, lora_name="some.safetensors", strength_model=1.0)
    sample(g, lora, parts.clip, "lora")

    result = server.run(g)

    assert result.error_node == lora
    assert "LoRA" in result.error and "\n" not in result.error


def test_cfg_and_batches(server: Server) -> None:
    """Two conditions and two pictures at once pass the proxy as they pass any model."""
    g = Graph()
    parts = demo(g)
    model = g.add("FluxFFTRunModel", run=train(g, parts, "cfg", 1))
    sampler, saved = sample(g, model, parts.clip, "cfg")
    negative = g.add("CLIPTextEncode", clip=parts.clip, text="a blue star")
    g[sampler]["inputs"] |= {"negative": negative.out(0), "cfg": 2.0}
    g[g[sampler]["inputs"]["latent_image"][0]]["inputs"]["batch_size"] = 2
    result = server.run(g)
    assert not result.error
    assert latent(server, saved, result).shape == (2, 16, 8, 8)


def test_a_full_disk_at_export(server: Server) -> None:
    """One line; the run and the file before it stay whole. Needs a small file system."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs the right to mount a small file system")
    small = server.base / "models/diffusion_models/small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        (small / "full.safetensors").write_bytes(b"the file before")
        g = Graph()
        trained = train(g, demo(g), "full", 1)
        out = g.add("FluxFFTExport", run=trained, filename="small/full", dtype="f32", overwrite=True)
        result = server.run(g)
        assert result.error_node == out
        assert "full" in result.error and "free" in result.error and "\n" not in result.error
        assert (small / "full.safetensors").read_bytes() == b"the file before"
        assert [p.name for p in small.iterdir()] == ["full.safetensors"]
        g[out]["inputs"]["filename"] = "roomy"
        assert not server.run(g).error, "the run is whole"
    finally:
        subprocess.run(["umount", str(small)], check=True)

"""Models exported with their text encoders and VAE in one file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from exports import raw, write
from safetensors.torch import load_file, save_file
from states import exact

from trainer.export.bundle import companions


def parts(folder: Path) -> dict[str, str]:
    g = torch.Generator().manual_seed(0)
    tensors = {
        "clip_l": {"text_model.encoder.layers.0.mlp.fc1.weight": torch.rand(4, 3, generator=g).half(),
                   "logit_scale": torch.tensor(4.6)},
        "t5": {"encoder.block.0.layer.0.SelfAttention.k.weight": torch.rand(3, 3).to(torch.float8_e4m3fn),
               "encoder.block.0.layer.0.SelfAttention.k.scale_weight": torch.tensor(0.5),
               "scaled_fp8": torch.empty(0).to(torch.float8_e4m3fn)},
        "vae": {"decoder.conv_in.weight": torch.rand(2, 16, 3, 3), "encoder.conv_in.weight": torch.rand(2, 3, 3, 3)},
    }  # fmt: skip
    for name, content in tensors.items():
        save_file(content, folder / f"{name}.safetensors")
    return {name: str(folder / f"{name}.safetensors") for name in tensors}


@pytest.mark.parametrize("swapped", [False, True])
def test_all_in_one_holds_the_encoders_and_the_vae_as_they_are(trained, tmp_path, swapped):
    run, trainer = trained
    files = parts(tmp_path)
    if swapped:
        files["clip_l"], files["t5"] = files["t5"], files["clip_l"]
    model = dataclasses.replace(trainer.config.model, **files)
    trainer.config = dataclasses.replace(trainer.config, model=model)
    done = write(run, tmp_path / "all.safetensors", trainer, all_in_one=True)
    found = load_file(tmp_path / "all.safetensors")
    assert "all in one" in done["text"]
    for name, value in exact(trainer).items():
        assert torch.equal(found.pop(f"model.diffusion_model.{name}"), value.bfloat16())
    places = {"clip_l": "text_encoders.clip_l.", "t5": "text_encoders.t5xxl.", "vae": "vae."}
    for kind, place in places.items():
        for name, value in load_file(tmp_path / f"{kind}.safetensors").items():
            inner = "" if kind == "vae" or name == "logit_scale" else "transformer."
            got = found.pop(place + inner + name)
            assert got.dtype == value.dtype and got.shape == value.shape
            assert torch.equal(raw(got), raw(value)), name
    assert not found


def test_quantized_layers_of_an_encoder_are_told_by_tensors(trained, tmp_path):
    run, trainer = trained
    files = parts(tmp_path)
    layers = {"layers": {"encoder.block.0.layer.0.SelfAttention.k": {"format": "float8_e4m3fn"}}}
    content = load_file(files["t5"])
    save_file(content, files["t5"], {"_quantization_metadata": json.dumps(layers)})
    model = dataclasses.replace(trainer.config.model, **files)
    made = {e.name: e for e in companions(model)}
    told = made["text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.k.comfy_quant"]
    assert json.loads(bytes(next(iter(told.chunks())).tolist())) == {"format": "float8_e4m3fn"}
    own = "encoder.block.0.layer.0.SelfAttention.k.comfy_quant"  # which a file may have, too
    save_file({**content, own: torch.tensor([1], dtype=torch.uint8)}, files["t5"],
              {"_quantization_metadata": json.dumps(layers)})
    (kept,) = [e for e in companions(model) if e.name.endswith(own)]
    assert torch.cat(list(kept.chunks())).tolist() == [1]


def test_all_in_one_without_its_parts_is_refused(trained, tmp_path):
    run, trainer = trained
    files = parts(tmp_path)
    for kind in files:
        for value, word in (("", "is not chosen"), (str(tmp_path / "gone"), "choose another file"),
                            (run.config.model.flux, "this is no")):  # fmt: skip
            model = dataclasses.replace(trainer.config.model, **{**files, kind: value})
            trainer.config = dataclasses.replace(trainer.config, model=model)
            with pytest.raises(ValueError, match=f"{kind} is .*{word}|{kind} {word}"):
                write(run, tmp_path / "x.safetensors", trainer, all_in_one=True)
    assert not (tmp_path / "x.safetensors").exists()

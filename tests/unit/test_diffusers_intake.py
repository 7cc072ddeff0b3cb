"""Weights under diffusers' names, from one file or from parts: against diffusers' own model and its own saving."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headers import DEV, check_refusal, diffusers, fake, flux

from trainer.flux.diffusers_names import diffusers_shapes
from trainer.flux.folders import weight_files
from trainer.flux.info import FileInfo
from trainer.flux.intake import open_source
from trainer.flux.model import TINY, Flux, build_meta, flux_params
from trainer.flux.variants import fingerprint, inspect_file, require_flux

SIZES = dataclasses.replace(TINY, hidden_size=256, num_heads=2, depth=2, depth_single_blocks=3)


@pytest.fixture(scope="module")
def theirs():
    """diffusers' Flux of the sizes, with random weights, norms and biases too, in float64."""
    logging.disable(logging.WARNING)
    from diffusers import FluxTransformer2DModel  # type: ignore[attr-defined]

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=SIZES.depth, num_single_layers=SIZES.depth_single_blocks,
        attention_head_dim=128, num_attention_heads=SIZES.num_heads, joint_attention_dim=SIZES.context_in_dim,
        pooled_projection_dim=SIZES.vec_in_dim, guidance_embeds=True, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip
    logging.disable(logging.NOTSET)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5 + 0.1
    return model


def ours(path: Path, info: FileInfo) -> Flux:
    model = build_meta(flux_params(info), torch.float32).to_empty(device="cpu")
    with open_source(path, info) as source:
        for name, parameter in model.named_parameters():
            parameter.data = source.read(name).view(parameter.shape)
    return model


SAVED: dict[str, Callable[[Path], Path]] = {
    "folder": lambda folder: folder,
    "file": lambda folder: folder / "diffusion_pytorch_model.safetensors",
}
SHARDED: dict[str, Callable[[Path], Path]] = {
    "folder of parts": lambda folder: folder,
    "index": lambda folder: folder / "diffusion_pytorch_model.safetensors.index.json",
    "first part": lambda folder: min(folder.glob("*-00001-of-*.safetensors")),
    "last part": lambda folder: max(folder.glob("*-of-*.safetensors")),
}


@pytest.mark.parametrize("which", [*SAVED, *SHARDED])
def test_outputs_are_those_of_diffusers(tmp_path: Path, theirs, which: str) -> None:
    sharded = which in SHARDED
    theirs.save_pretrained(tmp_path, max_shard_size="3MB" if sharded else "10GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == sharded
    path = (SHARDED if sharded else SAVED)[which](tmp_path)
    info = require_flux(path)
    assert flux_params(info) == SIZES and info.diffusers and info.dtype == "f32"
    assert info.params == sum(p.numel() for p in theirs.parameters())
    model = ours(path, info).double()
    h, w, tokens = 6, 8, 5
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, (h // 2) * (w // 2), 64, generator=generator).double()
    text = torch.randn(2, tokens, SIZES.context_in_dim, generator=generator).double()
    pooled = torch.randn(2, SIZES.vec_in_dim, generator=generator).double()
    timestep, guidance = torch.tensor([0.3, 0.9]).double(), torch.tensor([3.5, 1.0]).double()
    ids = torch.zeros((h // 2) * (w // 2), 3)
    ids[:, 1], ids[:, 2] = torch.arange(len(ids)) // (w // 2), torch.arange(len(ids)) % (w // 2)
    with torch.no_grad():
        wanted = theirs.double()(
            hidden_states=image, encoder_hidden_states=text, pooled_projections=pooled, timestep=timestep,
            guidance=guidance, img_ids=ids, txt_ids=torch.zeros(tokens, 3), return_dict=False)[0]  # fmt: skip
        img, txt, vec = model.embed(image, text, timestep, pooled, guidance)
        pe = model.rope(h, w, tokens)
        for block in model.double_blocks:
            img, txt = block(img, txt, vec, pe)
        stream = torch.cat((txt, img), dim=1)
        for block in model.single_blocks:
            stream = block(stream, vec, pe)
        found = model.final_layer(stream[:, tokens:], vec)
    assert wanted.abs().mean() > 0.1
    assert (found - wanted).abs().max() < 1e-6 * wanted.abs().max()
    theirs.float()


def test_slices_are_parts_of_the_whole(tmp_path: Path, theirs) -> None:
    """Wherever a chunk begins and ends: across query, key and value, and across the halves that are swapped."""
    theirs.save_pretrained(tmp_path, max_shard_size="3MB")
    info = require_flux(tmp_path)
    with open_source(tmp_path, info) as source:
        for name in ("double_blocks.1.txt_attn.qkv.weight", "single_blocks.2.linear1.bias",
                     "single_blocks.0.linear1.weight", "final_layer.adaLN_modulation.1.weight",
                     "double_blocks.0.img_attn.norm.key_norm.scale"):  # fmt: skip
            whole = source.read(name)
            assert whole.numel() == torch.Size(source.shapes[name]).numel() and whole.dtype == torch.float32
            for step in (whole.numel() // 7 + 1, whole.numel() // 3 - 1):
                pieces = [source.read(name, i, min(i + step, len(whole))) for i in range(0, len(whole), step)]
                assert torch.equal(torch.cat(pieces), whole), name


def test_every_tensor_of_diffusers_has_its_place(theirs) -> None:
    assert diffusers_shapes(dataclasses.asdict(SIZES)) == {
        name: tuple(p.shape) for name, p in theirs.named_parameters()
    }


def test_a_pipelines_folder_is_its_transformer(tmp_path: Path, theirs) -> None:
    theirs.save_pretrained(tmp_path / "transformer", max_shard_size="3MB")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert require_flux(tmp_path).params == require_flux(tmp_path / "transformer").params
    shard = min((tmp_path / "transformer").glob("*.safetensors"))
    assert fingerprint(tmp_path) == fingerprint(shard) == fingerprint(tmp_path / "transformer")
    for name, kind, words in (
        ("FluxKontextPipeline", "kontext", "is FLUX.1 Kontext (by its model_index.json: FluxKontextPipeline)"),
        ("StableDiffusionXLPipeline", "other", "is another model than Flux"),
        ("Flux2Pipeline", "flux2", "is FLUX.2"),
        ("ChromaPipeline", "chroma", "is Chroma"),
    ):
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        for path in (tmp_path, tmp_path / "transformer", shard):
            check_refusal(path, kind, words)


def test_parts_that_are_missing_are_named(tmp_path: Path, theirs) -> None:
    theirs.save_pretrained(tmp_path, max_shard_size="3MB")
    parts = sorted(tmp_path.glob("*.safetensors"))
    before = fingerprint(tmp_path)
    parts[1].rename(tmp_path / "elsewhere")
    words = f"is a model in {len(parts)} parts and lacks {parts[1].name}: put it into the same folder"
    for path in (tmp_path, parts[0], tmp_path / "diffusion_pytorch_model.safetensors.index.json"):
        check_refusal(path, "incomplete", words)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").unlink()
    fake(tmp_path / "a lora beside it.safetensors", {"x.lora_A.weight": ("F32", (1, 1))})
    check_refusal(tmp_path, "incomplete", words)
    (tmp_path / "elsewhere").rename(parts[1])
    assert require_flux(tmp_path).diffusers and fingerprint(tmp_path) == before
    content = parts[2].read_bytes()
    parts[2].write_bytes(content[:-100])
    check_refusal(tmp_path, "truncated", f"{parts[2].name} is cut short")
    parts[2].write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    check_refusal(tmp_path, "lfs", f"{parts[2].name} is a Git LFS pointer")


def test_what_is_said_of_other_folders(tmp_path: Path) -> None:
    check_refusal(tmp_path, "folder", "no .safetensors weights")
    fake(tmp_path / "ae.safetensors", {"decoder.conv_in.weight": ("BF16", (64, 64))})
    fake(tmp_path / "flux.safetensors", flux())
    check_refusal(tmp_path, "folder", "choose one of them, such as flux.safetensors")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    (tmp_path / "transformer").mkdir()
    check_refusal(tmp_path, "folder", "without weights in its folder transformer: download it whole")
    (tmp_path / "transformer" / "diffusion_pytorch_model.bin").touch()
    check_refusal(tmp_path, "pickle", "is a folder of pickled weights")
    shutil.rmtree(tmp_path / "transformer")
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "ae.safetensors").unlink()
    assert require_flux(tmp_path).params > 0
    (tmp_path / "flux.safetensors").unlink()
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"\x80\2")
    check_refusal(tmp_path, "pickle", "is a folder of pickled weights")
    fake(tmp_path / "diffusion_pytorch_model.safetensors", diffusers())
    assert require_flux(tmp_path).diffusers
    for config, kind, words in (
        ({"_class_name": "AutoencoderKL"}, "other", "holds a AutoencoderKL (by its config.json)"),
        ({"architectures": ["T5EncoderModel"]}, "other", "holds a T5EncoderModel"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized", "quantized by bitsandbytes"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        check_refusal(tmp_path, kind, words)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}',
                                  '{"weight_map": {"a": "\\u0000"}}', "[" * 100_000])  # fmt: skip
def test_an_index_may_say_anything(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.safetensors.index.json"
    path.write_text(text)
    for each in (path, tmp_path):
        info = inspect_file(each)
        assert not info.trainable and info.reason and "\n" not in info.reason and "passwd" not in info.reason
    for name in ("config.json", "model_index.json"):
        (tmp_path / name).write_text(text)
    assert not inspect_file(tmp_path).trainable


def test_a_variant_of_a_folder(tmp_path: Path) -> None:
    fake(tmp_path / "diffusion_pytorch_model.fp16.safetensors", diffusers(DEV, "F16"))
    assert require_flux(tmp_path).dtype == "f16"
    fake(tmp_path / "diffusion_pytorch_model.safetensors", diffusers())
    assert require_flux(tmp_path).dtype == "bf16"
    assert weight_files(tmp_path) == [tmp_path / "diffusion_pytorch_model.safetensors"]

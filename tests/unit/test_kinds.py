"""What is said of files that are no Flux to train: one line for each kind, from its first bytes, header or name."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from headers import DEV, ONE, TEXT_AND_VAE, Tensors, check_refusal, diffusers, fake, flux

from trainer.flux.variants import inspect_file


def fp8_scaled(prefix: str = "") -> Tensors:
    tensors = flux(DEV, "F8_E4M3", prefix)
    scales = {name[: -len("weight")] + "scale_weight": ("F32", (1,)) for name in tensors if name.endswith(".weight")}
    return tensors | scales | {prefix + "scaled_fp8": ("F8_E4M3", (2,))}


def packed(marks: dict[str, tuple[str, tuple[int, ...]]]) -> Tensors:
    """Blocks' matrices with two values per byte, and further tensors beside each."""
    out: Tensors = {}
    for name, (dtype, shape) in flux().items():
        if name.endswith(".weight") and "blocks." in name:
            out[name] = ("U8", (shape[0] * shape[1] // 2, 1))
            out.update({name.removesuffix("weight") + mark: value for mark, value in marks.items()})
        else:
            out[name] = (dtype, shape)
    return out


def wide(channels: int) -> Tensors:
    return flux() | {"img_in.weight": ("BF16", (3072, channels))}


NF4 = {"weight.absmax": ("F32", (8,)), "weight.quant_map": ("F32", (16,)),
       "weight.quant_state.bitsandbytes__nf4": ("U8", (80,))}  # fmt: skip
CHROMA = {k: v for k, v in flux().items() if "_mod" not in k and "modulation" not in k and "_in.in" not in k}
FLUX2 = {
    "img_in.weight": ("BF16", (6144, 128)), "txt_in.weight": ("BF16", (6144, 15360)),
    "double_stream_modulation_img.lin.weight": ("BF16", (36864, 6144)),
    "double_blocks.0.img_attn.qkv.weight": ("BF16", (18432, 6144)),
    "double_blocks.0.img_attn.norm.key_norm.scale": ("BF16", (128,)),
}  # fmt: skip


def part_of_diffusers() -> Tensors:
    return {k: v for k, v in diffusers().items() if k.startswith(("x_embedder", "transformer_blocks.0."))}


REFUSED: dict[str, tuple[str, str, Tensors, dict[str, str]]] = {
    "fp8": ("fp8", "has fp8 weights", flux(DEV, "F8_E4M3"), {}),
    "fp8 e5m2": ("fp8", "has fp8 weights", flux(DEV, "F8_E5M2"), {}),
    "fp8 but for biases": ("fp8", "has fp8 weights", {
        k: ("F8_E4M3" if k.endswith("weight") and "blocks" in k else "BF16", s) for k, (_, s) in flux().items()}, {}),
    "fp8 scaled": ("fp8", "has scaled fp8 weights", fp8_scaled(), {}),
    "fp8 scaled, newer": ("fp8", "has scaled fp8 weights", flux(DEV, "F8_E4M3"), {"_quantization_metadata": "{}"}),
    "fp8 scaled, newest": ("fp8", "has scaled fp8 weights", flux(DEV, "F8_E4M3") | {
        "double_blocks.0.img_attn.qkv.weight_scale": ("F32", ()),
        "double_blocks.0.img_attn.qkv.comfy_quant": ("U8", (30,))}, {}),
    "fp8 scaled, of inputs": ("fp8", "has scaled fp8 weights", flux(DEV, "F8_E4M3") | {
        "double_blocks.0.img_attn.qkv.input_scale": ("F32", ())}, {}),
    "fp8 scaled, of blocks": ("fp8", "has scaled fp8 weights", flux(DEV, "F8_E4M3") | {
        "double_blocks.0.img_attn.qkv.weight_scale_inv": ("F32", (24, 24))}, {}),
    "quanto": ("fp8", "has scaled fp8 weights", {
        f"{k}._data" if k.endswith("weight") else k: ("F8_E4M3" if k.endswith("weight") else d, s)
        for k, (d, s) in flux().items()} | {"double_blocks.0.img_attn.qkv.weight._scale": ("BF16", ())}, {}),
    "fp8 in an all-in-one": ("fp8", "has fp8", flux(DEV, "F8_E4M3", "model.diffusion_model.") | TEXT_AND_VAE, {}),
    "fp8 scaled in an all-in-one": ("fp8", "has scaled", fp8_scaled("model.diffusion_model.") | TEXT_AND_VAE, {}),
    "nf4": ("nf4", "has NF4 weights", packed(NF4), {}),
    "nvfp4": ("quantized", "quantized", packed({"weight_scale": ("F8_E4M3", (8,)), "weight_scale_2": ("F32", ())}), {}),
    "int8": ("quantized", "quantized", flux(DEV, "I8"), {}),
    "nunchaku": ("nunchaku", "has SVDQuant weights", {
        "transformer_blocks.0.qkv_proj.qweight": ("I8", (64, 64)), "transformer_blocks.0.qkv_proj.wscales": ONE,
        "transformer_blocks.0.qkv_proj.lora_down": ONE, "single_transformer_blocks.0.mlp_fc1.qweight": ("I8", (8, 8)),
        }, {}),
    "gptq": ("quantized", "quantized", {"transformer_blocks.0.attn.to_q.qweight": ("I32", (64, 64))}, {}),
    "float64": ("quantized", "type F64", flux(DEV, "F64"), {}),
    "diffusers, a part": ("incomplete", "lacks a well-formed proj_out.weight", part_of_diffusers(), {}),
    "diffusers, fp8": ("fp8", "has fp8 weights", diffusers(dtype="F8_E4M3"), {}),
    "diffusers, nf4": ("nf4", "has NF4 weights", diffusers() | {
        "transformer_blocks.0.attn.to_q.weight.quant_state.bitsandbytes__nf4": ("U8", (80,))}, {}),
    "diffusers, fp4": ("nf4", "has FP4 weights", diffusers() | {
        "transformer_blocks.0.attn.to_q.weight.quant_state.bitsandbytes__fp4": ("U8", (80,))}, {}),
    "diffusers, int8": ("quantized", "has int8 weights", diffusers(dtype="I8") | {
        "transformer_blocks.0.attn.to_q.SCB": ("F32", (3072,))}, {}),
    "diffusers, fill": ("fill", "is FLUX.1 Fill", diffusers() | {"x_embedder.weight": ("BF16", (3072, 384))}, {}),
    "diffusers, controlnet": ("controlnet", "is a ControlNet", part_of_diffusers() | {
        "controlnet_x_embedder.weight": ("BF16", (3072, 64)), "controlnet_blocks.0.weight": ONE}, {}),
    "fill": ("fill", "is FLUX.1 Fill", wide(384), {}),
    "canny": ("control", "is FLUX.1 Canny or Depth", wide(128), {}),
    "flex 2": ("other", "49 input channels", wide(196), {}),
    "chroma": ("chroma", "is Chroma", CHROMA | {"distilled_guidance_layer.norms.0.scale": ONE}, {}),
    "chroma radiance": ("chroma", "is Chroma", CHROMA | {"nerf_blocks.0.norm.scale": ONE}, {}),
    "flux 2": ("flux2", "is FLUX.2", FLUX2, {}),
    "flux 2, diffusers": ("flux2", "is FLUX.2", {"single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight": ONE}, {}),
    "controlnet": ("controlnet", "is a ControlNet", flux(DEV | {"depth": 2, "depth_single_blocks": 0})
                   | {"controlnet_blocks.0.weight": ONE}, {}),
    "lora, kohya": ("lora", "is a LoRA", {"lora_unet_double_blocks_0_img_attn_proj.lora_down.weight": ONE}, {}),
    "lora, diffusers": ("lora", "is a LoRA, not", {
        "transformer.transformer_blocks.0.attn.to_k.lora_A.weight": ONE}, {}),
    "lora, bfl": ("lora", "is a LoRA", {"double_blocks.0.img_attn.qkv.lora_B.weight": ONE,
                                        "double_blocks.0.img_attn.norm.key_norm.scale": ("BF16", (128,))}, {}),
    "lokr": ("lora", "is a LoKr", {"lycoris_double_blocks_0_img_mlp_0.lokr_w1": ONE}, {}),
    "loha": ("lora", "is a LoHa", {"lora_unet_double_blocks_0_img_mlp_0.hada_w1_a": ONE}, {}),
    "dora": ("lora", "is a DoRA", {"lora_unet_double_blocks_0_img_mlp_0.lora_up.weight": ONE,
                                   "lora_unet_double_blocks_0_img_mlp_0.dora_scale": ONE}, {}),
    "lora, wan": ("lora", "LoRA of another model", {"diffusion_model.blocks.0.cross_attn.k.lora_A.weight": ONE}, {}),
    "lora, qwen": ("lora", "LoRA of another model", {"transformer_blocks.0.img_mlp.net.0.proj.lora_A.weight": ONE}, {}),
    "lora, xlabs": ("lora", "is a LoRA, not", {"double_blocks.0.processor.qkv_lora1.down.weight": ONE}, {}),
    "lora, onetrainer": ("lora", "is a LoRA, not", {
        "lora_transformer_single_transformer_blocks_0_attn_to_k.lora_down.weight": ONE}, {}),
    "lora, sdxl": ("lora", "LoRA of another model", {
        "lora_unet_output_blocks_5_1_transformer_blocks_1_ff_net_2.lora_up.weight": ONE}, {}),
    "sdxl, whole": ("other", "Diffusion XL", {"model.diffusion_model.input_blocks.0.0.weight": ONE,
                                              "conditioner.embedders.1.model.ln_final.bias": ONE}, {}),
    "sd unet, diffusers": ("other", "Stable Diffusion UNet", {
        "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight": ONE}, {}),
    "sd3, diffusers": ("other", "Stable Diffusion 3", {
        "pos_embed.proj.weight": ONE, "transformer_blocks.0.attn.add_q_proj.weight": ONE}, {}),
    "qwen image": ("other", "is Qwen-Image", {"transformer_blocks.0.attn.to_q.weight": ONE,
                                              "transformer_blocks.0.img_mod.1.weight": ONE}, {}),
    "wan": ("other", "is a Wan video", {"blocks.0.cross_attn.k.bias": ONE}, {}),
    "hunyuan video": ("other", "is Hunyuan Video", {
        "double_blocks.0.img_attn.qkv.weight": ONE, "txt_in.individual_token_refiner.blocks.0.norm1.weight": ONE}, {}),
    "hunyuan image": ("other", "is Hunyuan Image", {"double_blocks.0.img_attn_q_norm.weight": ONE}, {}),
    "z-image": ("other", "Z-Image", {"noise_refiner.0.attention.k_norm.weight": ONE}, {}),
    "ip adapter": ("other", "is an IP-Adapter", {
        "double_blocks.0.processor.ip_adapter_double_stream_k_proj.weight": ONE}, {}),
    "sdxl": ("other", "is a Stable Diffusion", {"model.diffusion_model.input_blocks.0.0.weight": ONE}, {}),
    "sd3": ("other", "is Stable Diffusion 3", {"joint_blocks.0.x_block.attn.qkv.weight": ONE}, {}),
    "t5": ("text_encoder", "is a T5", {"encoder.block.0.layer.0.SelfAttention.k.weight": ONE}, {}),
    "clip": ("text_encoder", "is a CLIP", {"text_model.encoder.layers.0.mlp.fc1.weight": ONE}, {}),
    "vae": ("vae", "is a VAE", {"decoder.conv_in.weight": ONE}, {}),
    "redux": ("other", "Redux", {"redux_up.weight": ONE, "redux_down.weight": ONE}, {}),
    "unrelated": ("other", "its first tensor is a.weight", {"b.weight": ONE, "a.weight": ONE}, {}),
    "nothing": ("other", "holds no tensors", {}, {"a": "b"}),
    "part 1": ("incomplete", "get the whole file", dict(list(flux().items())[:-100]), {}),
    "part 2": ("incomplete", "get the whole file", dict(list(flux().items())[-100:]), {}),
    "no inputs": ("incomplete", "lacks a well-formed img_in.weight", {"double_blocks.0.img_mod.lin.weight": ONE}, {}),
    "a hole": ("incomplete", "lacks 1 of 780 tensors: single_blocks.5.linear2.bias", {
        k: v for k, v in flux().items() if k != "single_blocks.5.linear2.bias"}, {}),
    "odd shape": ("other", "txt_in.bias has the shape [5] instead of [3072]",
                  flux() | {"txt_in.bias": ("BF16", (5,))}, {}),
    "odd width": ("other", "unknown sizes (width 192)", flux(DEV | {"hidden_size": 192}), {}),
    "more layers": ("other", "unknown here (extra.weight)", flux() | {"extra.weight": ONE}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_said_of_other_files(tmp_path: Path, case: str) -> None:
    kind, words, tensors, metadata = REFUSED[case]
    path = fake(tmp_path / "some model.safetensors", tensors, metadata)
    check_refusal(path, kind, words)
    assert "use FLUX.1 dev" in inspect_file(path).reason


def test_kontext_is_told_by_its_file_name(tmp_path: Path) -> None:
    path = fake(tmp_path / "flux1-dev-Kontext.safetensors", flux())
    check_refusal(path, "kontext", "is FLUX.1 Kontext (by its file name: rename it if it is not)")
    path = fake(tmp_path / "a.safetensors", flux(), {"modelspec.architecture": "Flux.1-dev/kontext"})
    check_refusal(path, "kontext", "is FLUX.1 Kontext (by its metadata)")


def test_pickled_files(tmp_path: Path) -> None:
    for name in ("a.pt", "a.ckpt", "a.safetensors"):
        torch.save({"w": torch.zeros(3)}, tmp_path / name)
        check_refusal(tmp_path / name, "pickle", "is a pickled checkpoint")
    torch.save({"w": torch.zeros(3)}, tmp_path / "old.safetensors", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.bin").write_bytes(pickle.dumps({"w": 1}))
    check_refusal(tmp_path / "old.safetensors", "pickle", "is a pickled checkpoint")
    check_refusal(tmp_path / "plain.bin", "pickle", "is a pickled checkpoint")


def test_a_header_whose_length_begins_like_a_pickle_is_none(tmp_path: Path) -> None:
    for length in (0x280, 0x380, 0x480, 0x580):
        path = tmp_path / "a.sft"
        header = b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
        path.write_bytes(struct.pack("<Q", length) + header.ljust(length))
        check_refusal(path, "truncated", "cut short")


FIRST_BYTES = {
    "gguf": ("gguf", b"GGUF\x03\0\0\0" + b"\0" * 100, "is a GGUF file"),
    "lfs": ("lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 23802932552\n", "git lfs pull"),
    "html": ("html", b"\n<!DOCTYPE html>\n<html><head></head></html>", "is a web page"),
    "html, bare": ("html", b"\xef\xbb\xbf<html lang='en'>", "is a web page"),
    "xml": ("html", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is a web page"),
    "message": ("text", b"Access to model FLUX.1-dev is restricted. You must be authenticated.", "is a text file"),
    "json": ("text", b'{"error": "Invalid credentials"}', "is an error message of a web server"),
    "json, other": ("text", b'{"a": 1}', "is a text file"),
    "index": ("text", b'{\n  "metadata": {"total_size": 1},\n  "weight_map": {}\n}', "is a text file"),
    "gguf of flux": (
        "gguf",
        b"GGUF\x03\0\0\0"
        + bytes(16)
        + struct.pack("<Q", 20)
        + b"general.architecture"
        + struct.pack("<IQ", 8, 4)
        + b"flux"
        + bytes(50),
        "is a GGUF file of flux",
    ),
    "gzip": ("archive", b"\x1f\x8b\x08\0" + bytes(50), "is a packed archive"),
    "hdf5": ("other", b"\x89HDF\r\n\x1a\n" + bytes(50), "is an HDF5 file"),
    "half a zip": ("pickle", b"PK\x03\x04" + bytes(50), "that is not whole"),
    "empty": ("empty", b"", "is an empty file"),
    "noise": ("other", bytes(range(256)), "is not a safetensors file"),
    "zeros": ("other", b"\0" * 1000, "is not a safetensors file"),
}


@pytest.mark.parametrize("case", FIRST_BYTES)
def test_files_that_are_no_safetensors_at_all(tmp_path: Path, case: str) -> None:
    kind, content, words = FIRST_BYTES[case]
    (tmp_path / "flux1-dev.safetensors").write_bytes(content)
    check_refusal(tmp_path / "flux1-dev.safetensors", kind, words)


def test_downloads_that_are_not_finished(tmp_path: Path) -> None:
    path = fake(tmp_path / "flux1-dev.safetensors", flux())
    (tmp_path / "flux1-dev.safetensors.aria2").write_bytes(b"x")
    check_refusal(path, "downloading", "flux1-dev.safetensors.aria2 is beside it")
    (tmp_path / "flux1-dev.safetensors.aria2").unlink()
    for suffix in (".part", ".crdownload", ".incomplete"):
        beside = path.rename(tmp_path / f"flux1-dev.safetensors{suffix}")
        check_refusal(beside, "downloading", "is a download that is not finished")
        check_refusal(path, "downloading", f"flux1-dev.safetensors{suffix} is a download that is not finished")
        fake(path, flux(), cut=10**9)
        check_refusal(path, "downloading", f"flux1-dev.safetensors{suffix} is beside it")
        path.unlink()
        beside.rename(path)
        fake(beside, {})  # a new export is being written over it
        assert inspect_file(path).trainable
        beside.unlink()


def test_zip_archives(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "flux.safetensors", "w") as archive:
        archive.writestr("flux1-dev.safetensors", b"")
    check_refusal(tmp_path / "flux.safetensors", "archive", "is a ZIP archive: unpack it")


def test_names_in_a_file_do_not_break_the_line(tmp_path: Path) -> None:
    path = fake(tmp_path / "a.safetensors", {"a\nb\u2028\0\x1b[31m": ONE})
    check_refusal(path, "other", "its first tensor is a b")
    path = fake(tmp_path / "b.safetensors", {"\ud800": ONE})
    info = inspect_file(path)
    assert info.kind == "other" and info.reason.encode("utf-8", "backslashreplace")

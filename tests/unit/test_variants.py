"""Which files are taken for a Flux, and what is said of each other kind. Headers are made here at their real sizes."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainer.flux.model import TINY, FluxParams, build_meta, flux_params, init_weights_
from trainer.flux.sizes import shapes_of
from trainer.flux.variants import fingerprint, inspect_file, require_flux, text_length
from trainer.header import BITS
from trainer.weights import entry, load_weights_, write_safetensors

ROOT = Path(__file__).parents[2]
DEV = dataclasses.asdict(FluxParams())
SCHNELL = DEV | {"guidance_embed": False}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def fake(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None, cut: int = 0) -> Path:
    """A safetensors file with a true header and a hole for its data: 24 GB that take no room."""
    table: dict = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = BITS[dtype]
        for side in shape:
            size *= side
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size // 8]}
        offset += size // 8
    head = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + offset - cut)
    return path


def flux(sizes: dict = DEV, dtype: str = "BF16", prefix: str = "") -> Tensors:
    return {prefix + name: (dtype, shape) for name, shape in shapes_of(sizes).items()}


TEXT_AND_VAE: Tensors = {
    "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight": ("F8_E4M3", (4096, 4096)),
    "text_encoders.t5xxl.transformer.scaled_fp8": ("F8_E4M3", (0,)),
    "text_encoders.clip_l.transformer.text_model.embeddings.token_embedding.weight": ("F16", (49408, 768)),
    "vae.decoder.conv_in.weight": ("F32", (512, 16, 3, 3)),
}


@pytest.mark.parametrize("sizes", [DEV, SCHNELL, dataclasses.asdict(TINY)], ids=["dev", "schnell", "tiny"])
def test_shapes_are_the_model_s(sizes: dict) -> None:
    model = build_meta(FluxParams(**sizes))
    assert list(shapes_of(sizes).items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_flux_is_recognised(tmp_path: Path, prefix: str, dtype: str) -> None:
    info = require_flux(fake(tmp_path / "flux1-dev.safetensors", flux(DEV, dtype, prefix)))
    assert (info.kind, info.variant, info.trainable, info.reason) == ("flux", "dev", True, "")
    assert info.dtype == {"BF16": "bf16", "F16": "f16", "F32": "f32"}[dtype]
    assert info.params == 11_901_408_320 and info.prefix == prefix and not info.all_in_one
    assert flux_params(info) == FluxParams() and text_length(info) == 512


def test_schnell_has_no_guidance_and_shorter_captions(tmp_path: Path) -> None:
    info = require_flux(fake(tmp_path / "a.safetensors", flux(SCHNELL)))
    assert info.variant == "schnell" and text_length(info) == 256
    assert flux_params(info) == FluxParams(guidance_embed=False)


def test_an_all_in_one_checkpoint_with_an_fp8_text_encoder(tmp_path: Path) -> None:
    tensors = flux(DEV, "BF16", "model.diffusion_model.") | TEXT_AND_VAE
    info = require_flux(fake(tmp_path / "a.safetensors", tensors))
    assert info.all_in_one and info.dtype == "bf16" and info.params == 11_901_408_320


def test_a_pruned_flux_gives_its_own_depths(tmp_path: Path) -> None:
    info = require_flux(fake(tmp_path / "flux-lite-8b.safetensors", flux(DEV | {"depth": 8})))
    assert flux_params(info).depth == 8 and flux_params(info).depth_single_blocks == 38


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("suffix", ["scale", "weight"])
def test_the_weights_of_each_layout_are_found(tmp_path: Path, prefix: str, suffix: str, base: torch.dtype) -> None:
    model = init_weights_(build_meta(TINY, base).to_empty(device="cpu"), 7)
    names = {n: prefix + (n[:-5] + suffix if n.endswith("_norm.scale") else n) for n, _ in model.named_parameters()}
    extra = [entry("vae.decoder.conv_in.weight", torch.zeros(8)), entry("text_encoders.x", torch.zeros(3))]
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry(names[n], p) for n, p in model.named_parameters()] + extra)
    info = require_flux(path)
    assert {n: info.tensor_name(n) for n in names} == names and info.all_in_one
    again = build_meta(flux_params(info), base).to_empty(device="cpu")
    load_weights_(again, path, {n: info.tensor_name(n) for n in names})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


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
DIFFUSERS = {
    "x_embedder.weight": ("BF16", (3072, 64)), "transformer_blocks.0.attn.to_q.weight": ("BF16", (3072, 3072)),
    "single_transformer_blocks.0.attn.to_q.weight": ("BF16", (3072, 3072)),
}  # fmt: skip
ONE = ("BF16", (64, 64))

REFUSED: dict[str, tuple[str, str, Tensors, dict[str, str]]] = {
    "fp8": ("fp8", "has fp8 weights", flux(DEV, "F8_E4M3"), {}),
    "fp8 e5m2": ("fp8", "has fp8 weights", flux(DEV, "F8_E5M2"), {}),
    "fp8 but for biases": ("fp8", "has fp8 weights", {
        k: ("F8_E4M3" if k.endswith("weight") and "blocks" in k else "BF16", s) for k, (_, s) in flux().items()}, {}),
    "fp8 scaled": ("fp8", "has scaled fp8 weights", fp8_scaled(), {}),
    "fp8 scaled, newer": ("fp8", "has scaled fp8 weights", flux(DEV, "F8_E4M3"), {"_quantization_metadata": "{}"}),
    "fp8 in an all-in-one": ("fp8", "has fp8", flux(DEV, "F8_E4M3", "model.diffusion_model.") | TEXT_AND_VAE, {}),
    "fp8 scaled in an all-in-one": ("fp8", "has scaled", fp8_scaled("model.diffusion_model.") | TEXT_AND_VAE, {}),
    "nf4": ("nf4", "has NF4 weights", packed(NF4), {}),
    "nvfp4": ("quantized", "quantized", packed({"weight_scale": ("F8_E4M3", (8,)), "weight_scale_2": ("F32", ())}), {}),
    "int8": ("quantized", "quantized", flux(DEV, "I8"), {}),
    "nunchaku": ("quantized", "quantized", {"transformer_blocks.0.qkv_proj.qweight": ("I8", (64, 64)),
                                            "transformer_blocks.0.qkv_proj.lora_down": ONE}, {}),
    "float64": ("quantized", "type F64", flux(DEV, "F64"), {}),
    "diffusers": ("diffusers", "diffusers' names", DIFFUSERS, {}),
    "diffusers, prefixed": ("diffusers", "diffusers' names", {f"transformer.{k}": v for k, v in DIFFUSERS.items()}, {}),
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
    "lora, diffusers": ("lora", "is a LoRA", {"transformer.transformer_blocks.0.attn.to_k.lora_A.weight": ONE}, {}),
    "lora, bfl": ("lora", "is a LoRA", {"double_blocks.0.img_attn.qkv.lora_B.weight": ONE,
                                        "double_blocks.0.img_attn.norm.key_norm.scale": ("BF16", (128,))}, {}),
    "lokr": ("lora", "is a LoRA", {"lycoris_double_blocks_0_img_mlp_0.lokr_w1": ONE}, {}),
    "sdxl": ("other", "is a Stable Diffusion", {"model.diffusion_model.input_blocks.0.0.weight": ONE}, {}),
    "sd3": ("other", "is Stable Diffusion 3", {"joint_blocks.0.x_block.attn.qkv.weight": ONE}, {}),
    "t5": ("other", "is a T5", {"encoder.block.0.layer.0.SelfAttention.k.weight": ONE}, {}),
    "clip": ("other", "is a CLIP", {"text_model.encoder.layers.0.mlp.fc1.weight": ONE}, {}),
    "vae": ("other", "is a VAE", {"decoder.conv_in.weight": ONE}, {}),
    "redux": ("other", "Redux", {"redux_up.weight": ONE, "redux_down.weight": ONE}, {}),
    "unrelated": ("other", "its first tensor is a.weight", {"b.weight": ONE, "a.weight": ONE}, {}),
    "nothing": ("other", "holds no tensors", {}, {"a": "b"}),
    "part 1": ("incomplete", "if it is one part of several", dict(list(flux().items())[:-100]), {}),
    "part 2": ("incomplete", "if it is one part of several", dict(list(flux().items())[-100:]), {}),
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


def check_refusal(path: Path, kind: str, words: str) -> None:
    info = inspect_file(path)
    assert (info.kind, info.trainable, info.flux) == (kind, False, None), info
    assert words in info.reason and str(path) in info.reason and "\n" not in info.reason, info.reason
    with pytest.raises(ValueError) as caught:
        require_flux(path)
    assert str(caught.value) == info.reason


def test_kontext_is_told_by_its_file_name(tmp_path: Path) -> None:
    check_refusal(fake(tmp_path / "flux1-dev-Kontext.safetensors", flux()), "kontext", "is FLUX.1 Kontext")


def test_a_few_leftover_numbers_do_no_harm(tmp_path: Path) -> None:
    assert require_flux(fake(tmp_path / "a.safetensors", flux() | {"step": ("F32", (1,))})).params == 11_901_408_320


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
    "json": ("text", b'{"error": "Invalid credentials"}', "is a text file"),
    "index": ("text", b'{\n  "metadata": {"total_size": 1},\n  "weight_map": {}\n}', "is a text file"),
    "empty": ("empty", b"", "is an empty file"),
    "noise": ("other", bytes(range(256)), "is not a safetensors file"),
    "zeros": ("other", b"\0" * 1000, "is not a safetensors file"),
}


@pytest.mark.parametrize("case", FIRST_BYTES)
def test_files_that_are_no_safetensors_at_all(tmp_path: Path, case: str) -> None:
    kind, content, words = FIRST_BYTES[case]
    (tmp_path / "flux1-dev.safetensors").write_bytes(content)
    check_refusal(tmp_path / "flux1-dev.safetensors", kind, words)


def test_a_download_that_was_cut_short(tmp_path: Path) -> None:
    path = fake(tmp_path / "a.safetensors", flux(), cut=10**9)
    check_refusal(path, "truncated", "is cut short: 22,8")
    path.write_bytes(path.open("rb").read(1000))
    check_refusal(path, "truncated", "is cut short within its header")


def test_folders_missing_and_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refusal(tmp_path, "folder", "is a folder")
    check_refusal(tmp_path / "none.safetensors", "missing", "does not exist")
    check_refusal(tmp_path / "none.safetensors" / "x", "missing", "does not exist")
    assert inspect_file("a\0b").kind == "unreadable"
    path = fake(tmp_path / "a.safetensors", flux())

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    check_refusal(path, "unreadable", "Permission denied")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda b: struct.pack("<Q", len(b)) + b))
def test_no_bytes_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    info = inspect_file(tmp_path / "a.safetensors")
    assert not info.trainable and info.reason and "\n" not in info.reason


SIZES = dataclasses.asdict(TINY)
SOME = st.sampled_from([*list(shapes_of(SIZES))[:40], "__metadata__"])
VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=3) | st.floats(), lambda v: st.lists(v, max_size=3))
TENSOR = st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES | st.just([0, 0]) | st.just("F32"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(SOME, VALUES | TENSOR, min_size=1), st.booleans())
@example({"__metadata__": 1}, True)
def test_no_header_raises(tmp_path: Path, changes: dict, whole: bool) -> None:
    """Random headers, and the header of a good file with some entries replaced."""
    path = fake(tmp_path / "a.safetensors", flux(SIZES))
    if whole:
        with open(path, "rb") as file:
            changes = json.loads(file.read(struct.unpack("<Q", file.read(8))[0])) | changes
    head = json.dumps(changes).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head)
    info = inspect_file(path)
    assert not info.trainable and info.reason and "\n" not in info.reason


def test_fingerprints(tmp_path: Path) -> None:
    model = init_weights_(build_meta(TINY, torch.float32).to_empty(device="cpu"), 0)
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry(n, p) for n, p in model.named_parameters()])
    first = fingerprint(path)
    assert len(first) == 64 and fingerprint(path) == first
    (tmp_path / "b.bin").write_bytes(path.read_bytes())
    assert fingerprint(tmp_path / "b.bin") == first, "the name does not count"
    content = bytearray(path.read_bytes())
    assert len(content) < 256 * 16 * 1024
    for place in (9, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert fingerprint(path) != first
    path.write_bytes(content)
    sampled = fingerprint(path, samples=16, sample_bytes=1024)
    for place in (9, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert fingerprint(path, samples=16, sample_bytes=1024) != sampled
    init_weights_(model, 1)
    write_safetensors(path, [entry(n, p) for n, p in model.named_parameters()])
    assert fingerprint(path, samples=16, sample_bytes=1024) != sampled
    for size in (0, 3, 8):
        (tmp_path / "c").write_bytes(b"\xff" * size)
        assert len(fingerprint(tmp_path / "c")) == 64


def test_a_fingerprint_of_24_gb_takes_no_time(tmp_path: Path) -> None:
    """It reads its samples and no more: counted, not timed."""
    path = fake(tmp_path / "a.safetensors", flux())
    code = (
        "import builtins, sys\nsys.path.insert(0, sys.argv[2])\nread, real = [], open\n"
        "class Counted:\n"
        "    def __init__(self, file): self.file = file\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *a): self.file.close()\n"
        "    def __getattr__(self, name): return getattr(self.file, name)\n"
        "    def read(self, *a):\n        out = self.file.read(*a); read.append(len(out)); return out\n"
        "from trainer.flux.variants import fingerprint\n"
        "builtins.open = lambda *a, **k: Counted(real(*a, **k))\n"
        "fingerprint(sys.argv[1]); print(sum(read), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, torch_loaded = done.stdout.split()
    assert 4 * 2**20 < int(count) < 5 * 2**20
    assert torch_loaded == "False"

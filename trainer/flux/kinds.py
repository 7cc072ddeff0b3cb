"""What files are that are no Flux to train: told from their first bytes, or from the names of their tensors.

Each is named in a few words, with the way out. Key names read off ComfyUI's ``model_detection.py``, diffusers'
``single_file_utils.py``, ComfyUI-GGUF, nunchaku and bitsandbytes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from ..header import TensorInfo

Refusal = tuple[str, str]
"""A kind, and what the file is, which goes on from its name: ``has fp8 weights, which cannot be trained``."""

_UNFINISHED = (".part", ".crdownload", ".download", ".incomplete", ".opdownload", ".!ut", ".aria2")
"""What browsers and download tools put behind the name of a file that is not whole."""


def by_name(path: Path) -> Refusal | None:
    """What can be said of a path without opening it: by its name, and by those beside it."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        return "unreadable", "is a pipe or a device, not a file"  # reading it might never end
    if path.name.lower().endswith(_UNFINISHED):
        return "downloading", "is a download that is not finished: wait for it, or begin it anew; then choose the file"
    # It makes the file in its whole length at once, so neither length nor header show what is missing.
    if os.path.exists(f"{path}.aria2"):
        return "downloading", f"is still being downloaded ({path.name}.aria2 is beside it): wait until that is gone"
    return None


def downloading(path: Path) -> str:
    """The name of an unfinished download that stands for ``path``, which is missing or too short; empty: none."""
    return next((path.name + suffix for suffix in _UNFINISHED if os.path.exists(f"{path}{suffix}")), "")


def growing(path: Path) -> str:
    """What to add of a file that is too short, if it was written to within two minutes."""
    try:
        lately = time.time() - path.stat().st_mtime < 120
    except OSError:
        return ""
    return " (it was written to a moment ago: if it is still being downloaded, wait)" if lately else ""


def by_first_bytes(path: Path) -> Refusal | None:
    """What a file is that is no safetensors file; None if it may be one."""
    with open(path, "rb") as file:
        start = file.read(512)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "empty", "is an empty file: download it again"
    if start.startswith(b"version https://git-lfs"):
        return "lfs", "is a Git LFS pointer, not the weights: run 'git lfs pull', or download the file itself"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "html", "is a web page saved under that name: download the file again (log in first if asked to)"
    if start.startswith(b"GGUF"):
        return "gguf", f"is a GGUF file{_gguf(start)}, a format of quantized weights, which cannot be trained"
    if start.startswith(b"PK\x03\x04"):
        return _archive(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5") and start[8:9] != b"{":
        return "pickle", _PICKLE
    if start.startswith((b"7z\xbc\xaf", b"Rar!", b"\x1f\x8b", b"BZh", b"\xfd7zXZ")):
        return "archive", "is a packed archive: unpack it and choose the file in it"
    if start.startswith(b"\x89HDF\r\n"):
        return "other", "is an HDF5 file (Keras), which is not read"
    if start.startswith(b"\x08") and b"onnx" in start[:64].lower():
        return "other", "is an ONNX model, which cannot be trained"
    if b"\x00" not in start and not re.search(rb"[\x00-\x08\x0e-\x1f]", start):
        if text.startswith((b"{", b"[")) and re.search(rb'"(error|message|detail|code)"', text):
            return "text", "is an error message of a web server, not weights: download the file again (log in first)"
        return "text", "is a text file, not weights (an error message?): download the file itself"
    return None


_PICKLE = "is a pickled checkpoint, which can run code when opened and is not read: get it as .safetensors"


def _archive(path: Path) -> Refusal:
    """torch's own files are ZIP archives of a pickle and its data."""
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        # Its list of contents is at its end: cut short, or not finished.
        return "pickle", "is a pickled checkpoint or a ZIP archive that is not whole, and is not read"
    if any(name.endswith("data.pkl") for name in names):
        return "pickle", _PICKLE
    return "archive", "is a ZIP archive: unpack it and choose the .safetensors file in it"


def _gguf(start: bytes) -> str:
    """`` of flux``, from the first entry of the table that follows 4 + 4 + 8 + 8 bytes, which names the architecture.

    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    key = b"general.architecture"
    at = start.find(key, 24, 24 + 8 + len(key))
    if at < 0:
        return ""
    at += len(key) + 4  # past the type of the value
    length = int.from_bytes(start[at : at + 8], "little")
    named = start[at + 8 : at + 8 + min(length, 40)].decode("ascii", "replace")
    return f" of {named}" if named.isprintable() and named else ""


LORA = re.compile(
    r"(^|[._])lora_|[._]lora\.(up|down)\.|\.processor\..*_lora\d?\.|\.(hada_w|lokr_|oft_|dora_scale|diff(_b)?$)"
)
"""What only the tensors of a LoRA, or of its relatives, are called."""


def lora(names: Collection[str]) -> str:
    """What kind of LoRA the names are of; empty: of none."""
    if not any(LORA.search(name) for name in names) or any(name.endswith(".qweight") for name in names):
        return ""
    for mark, called in (("hada_w", "LoHa"), ("lokr_", "LoKr"), ("oft_", "OFT"), ("dora_scale", "DoRA"),
                         ("lora_magnitude_vector", "DoRA")):  # fmt: skip
        if any(mark in name for name in names):
            return f"a {called}, a relative of LoRA"
    # Flux, SD3 and others share diffusers' transformer_blocks: only what is surely another's is called so.
    ours = any(re.search(r"(double|single)_blocks[._]\d|single_transformer_blocks[._]\d", name) for name in names)
    return "a LoRA" if ours or not any(map(_OTHERS_LORA.search, names)) else "a LoRA of another model than FLUX.1"


_OTHERS_LORA = re.compile(
    r"(down|up|mid|input|output|middle)_blocks?[._]|(^|[._])(joint_)?blocks[._]\d+[._](cross|self|x_block|context)|"
    r"img_mlp[._]net|(^|[._])layers[._]\d+[._](attention|self_attn|feed_forward)"
)


def other_family(inside: Collection[str]) -> Refusal | None:
    """What models are that share Flux's blocks; ``inside``: their names without prefix."""
    for kind, pattern, what in _FAMILIES:
        if any(re.search(rf"(^|\.)({pattern})", name) for name in inside):
            return kind, what
    return None


_FAMILIES = (
    ("flux2", r"double_stream_modulation_img\.|single_transformer_blocks\.\d+\.attn\.to_qkv_mlp_proj\.",
     "is FLUX.2, whose architecture is another and cannot be trained yet"),
    ("chroma", r"distilled_guidance_layer\.|nerf_|x_embedder_nerf",
     "is Chroma, whose architecture is another and cannot be trained yet"),
    ("controlnet", r"controlnet_|input_hint_block\.|pos_embed_input\.|control_mode_embedder\.",
     "is a ControlNet for Flux, not the model itself"),
    ("other", r"txt_in\.individual_token_refiner\.", "is Hunyuan Video, not a Flux"),
    ("other", r"double_blocks\.0\.img_attn_q_norm\.|byt5_in\.", "is Hunyuan Image, not a Flux"),
    ("other", r"latent_in\.", "is Hunyuan 3D, not a Flux"),
    ("other", r"ip_adapter_", "is an IP-Adapter for Flux, not the model itself"),
)  # fmt: skip


def quantized(inside: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> Refusal | None:
    """What weights are that were rounded to few bits."""
    if any(name.endswith(".qweight") for name in inside):
        if any(name.endswith((".wscales", ".wtscale", ".smooth", ".smooth_factor", ".smooth_orig")) for name in inside):
            return "nunchaku", "has SVDQuant weights of nunchaku (4 bits), which cannot be trained"
        return "quantized", "has quantized weights (4 or 8 bits), which cannot be trained"
    if any(".absmax" in name or "bitsandbytes" in name for name in inside):
        four = "FP4" if any("bitsandbytes__fp4" in name for name in inside) else "NF4"
        return "nf4", f"has {four} weights (bitsandbytes, 4 bits), which cannot be trained"
    dtypes = {t.dtype for name, t in inside.items() if name.endswith((".weight", ".weight._data"))}
    scaled = "_quantization_metadata" in metadata or any(name.endswith(_SCALES) for name in inside)
    if any(dtype.startswith("F8_") for dtype in dtypes) and "U8" not in dtypes:
        return "fp8", f"has {'scaled ' if scaled else ''}fp8 weights (8 bits), which cannot be trained"
    if any(name.endswith((".SCB", ".weight_format")) for name in inside) or "I8" in dtypes:
        return "quantized", "has int8 weights, quantized to 8 bits, which cannot be trained"
    if scaled or dtypes - _WHOLE_DTYPES:
        return "quantized", "has quantized weights, which cannot be trained"
    return None


_SCALES = (".scale_weight", ".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".comfy_quant", "scaled_fp8",
           ".weight._scale", ".scale_input", ".input_scale")  # fmt: skip
_WHOLE_DTYPES = {"BF16", "F16", "F32", "F64"}


def other(names: Collection[str]) -> Refusal:
    """What a file is that has none of Flux's blocks."""
    for pattern, what in _OTHERS:
        if any(re.search(pattern, name) for name in names):
            kind = "text_encoder" if "text encoder" in what else "vae" if "VAE" in what else "other"
            return kind, f"is {what}"
    return "other", f"holds no Flux (its first tensor is {min(names)})" if names else "holds no tensors"


_OTHERS = (
    (r"\.qweight$", "a model with quantized weights"),
    (r"(^|\.)joint_blocks\.0\.", "Stable Diffusion 3, not a Flux"),
    (r"^conditioner\.embedders\.1\.|(^|\.)label_emb\.0\.0\.weight$", "a Stable Diffusion XL checkpoint, not a Flux"),
    (r"(^|\.)input_blocks\.0\.0\.weight$", "a Stable Diffusion 1, 2 or XL checkpoint, not a Flux"),
    (r"(^|\.)down_blocks\.0\.(attentions|resnets)\.0\..*(attn1|time_emb_proj)", "a Stable Diffusion UNet, not a Flux"),
    (r"(^|\.)redux_up\.", "the FLUX.1 Redux adapter, not the model itself"),
    (r"^(ip_adapter|image_proj)", "an IP-Adapter, not a Flux"),
    (r"(^|\.)(img_mod\.1|img_mlp\.net\.0\.proj)\.", "Qwen-Image, not a Flux"),
    (r"(^|\.)pos_embed\.proj\.weight$", "Stable Diffusion 3 or another transformer under diffusers' names, not a Flux"),
    (r"(^|\.)(vace_blocks|blocks)\.0\.(cross_attn|self_attn)\.(q|k)\.", "a Wan video model, not a Flux"),
    (r"(^|\.)(cap_embedder|noise_refiner)\.", "Lumina or Z-Image, not a Flux"),
    (r"(^|\.)double_stream_blocks\.", "HiDream, not a Flux"),
    (r"(^|\.)double_layers\.0\.", "AuraFlow, not a Flux"),
    (r"(^|\.)adaln_single\.", "PixArt or LTX-Video, not a Flux"),
    (r"(^|\.)encoder\.block\.0\.layer\.", "a T5 text encoder: choose it as t5"),
    (r"(^|\.)text_model\.encoder\.|(^|\.)transformer\.resblocks\.", "a CLIP text encoder: choose it as clip_l"),
    (r"(^|\.)vision_model\.encoder\.", "a CLIP vision encoder, not a Flux"),
    (r"(^|\.)model\.layers\.0\.self_attn\.|^layers\.0\.self_attn\.", "a language model, the text encoder of others"),
    (r"(^|\.)decoder\.(conv_in|up\.0|up_blocks\.0)\.", "a VAE: choose it as vae"),
    (r"(^|\.)(body\.0\.rdb1|model\.1\.sub\.0|conv_first)\.", "an upscaling model, not a Flux"),
)

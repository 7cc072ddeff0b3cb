"""What file is this? Reads headers only, without torch, and says in one line why a file cannot be trained."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..header import MAX_HEADER, Header, NotSafetensors, TensorInfo, Truncated, read_header
from .sizes import HEAD_DIM, shapes_of, sizes_of

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "")
"""What may stand before the names: all-in-one checkpoints and ComfyUI's own saves, or nothing."""
DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
"""The dtypes that can be trained, and what we call them."""
USE = "use FLUX.1 dev, FLUX.1 Krea dev or FLUX.1 schnell as a bf16, f16 or f32 .safetensors file"
STRAY = 4096
"""Unknown tensors with fewer elements than this in all are leftovers; with more, they are layers of another model."""


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What a file is. What follows ``reason`` is filled in only where ``trainable``."""

    path: str
    kind: str
    """``flux`` if it can be trained, else what it is: ``fill``, ``control``, ``kontext``, ``chroma``, ``flux2``,
    ``controlnet``, ``fp8``, ``nf4``, ``quantized``, ``gguf``, ``diffusers``, ``pickle``, ``lora``, ``lfs``, ``html``,
    ``text``, ``truncated``, ``incomplete``, ``missing``, ``folder``, ``unreadable``, ``empty`` or ``other``."""
    trainable: bool = False
    reason: str = ""
    """Why it cannot be trained and what to use instead, in one line; empty if it can."""
    variant: str = ""
    """``dev`` (guidance-distilled: Krea too) or ``schnell``."""
    dtype: str = ""
    """``bf16``, ``f16`` or ``f32``: that of most of its parameters."""
    params: int = 0
    """Number of parameters of the Flux in it."""
    prefix: str = ""
    """What stands before each of the Flux's names in the file."""
    norm_suffix: str = "scale"
    """Last part of the norms' names in the file: ``scale`` (Black Forest Labs) or ``weight`` (ComfyUI from 0.9 on)."""
    all_in_one: bool = False
    """Whether the file holds other models (text encoders, VAE) too."""
    flux: dict[str, Any] | None = None
    """The fields of ``model.FluxParams``."""

    def tensor_name(self, parameter: str) -> str:
        """The file's name of a parameter of ``model.Flux``."""
        if parameter.endswith("_norm.scale"):
            parameter = parameter[: -len("scale")] + self.norm_suffix
        return self.prefix + parameter


def require_flux(path: str | os.PathLike[str]) -> FileInfo:
    """``inspect_file`` of a Flux that can be trained; of another, raises ``ValueError`` with its reason (one line)."""
    info = inspect_file(path)
    if not info.trainable:
        raise ValueError(info.reason)
    return info


def text_length(info: FileInfo) -> int:
    """Tokens of a T5 caption: 512 for dev, 256 for schnell."""
    return 512 if info.variant == "dev" else 256


def inspect_file(path: str | os.PathLike[str]) -> FileInfo:
    """Say what a file is, from its first bytes, header and name. Never raises for a file's sake."""
    try:
        kind, reason = _by_first_bytes(Path(path))
        if not kind:
            return _by_header(path, read_header(path))
    except Truncated as error:
        kind, reason = "truncated", str(error)
    except NotSafetensors as error:
        kind, reason = "other", f"{error}; {USE}"
    except FileNotFoundError:
        kind, reason = "missing", f"{path} does not exist: choose a Flux .safetensors file"
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        problem = getattr(error, "strerror", None) or error
        kind, reason = "unreadable", f"{path} cannot be read ({problem}): check the path and its permissions"
    return FileInfo(path=str(path), kind=kind, reason=reason)


def _by_first_bytes(path: Path) -> tuple[str, str]:
    """Kind and reason of what is no safetensors file; two empty strings if it may be one."""
    if path.is_dir():
        return "folder", f"{path} is a folder: choose the Flux .safetensors file itself"
    with open(path, "rb") as file:
        start = file.read(512)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "empty", f"{path} is an empty file: download it again"
    if start.startswith(b"version https://git-lfs"):
        return "lfs", f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull', or download the file itself"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "html", f"{path} is a web page saved under that name: download the file again (log in first if asked to)"
    if start.startswith(b"GGUF"):
        return "gguf", f"{path} is a GGUF file, whose weights are quantized and cannot be trained; {USE}"
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5" and start[8:9] != b"{"):
        return "pickle", f"{path} is a pickled checkpoint, which can run code when opened and is not read; {USE}"
    if not re.search(rb"[\x00-\x08\x0e-\x1f]", start):
        return "text", f"{path} is a text file, not weights (an error message, or an index?): download the file itself"
    return "", ""


def _by_header(path: str | os.PathLike[str], header: Header) -> FileInfo:
    def refuse(kind: str, what: str, instead: str = USE) -> FileInfo:
        return FileInfo(path=str(path), kind=kind, reason=f"{path} {what}; {instead}")

    names = header.tensors
    if any(_LORA.search(name) for name in names) and not any(name.endswith(".qweight") for name in names):
        return refuse("lora", "is a LoRA, not a whole model", "choose the model that it was made for, or " + USE)
    prefix = next((p for p in PREFIXES if any(n.startswith(p) and _BLOCK.match(n, len(p)) for n in names)), None)
    if prefix is None:
        return refuse(*_no_flux(names))
    inside = {name[len(prefix) :]: t for name, t in names.items() if name.startswith(prefix)}
    if not prefix:
        inside = {name: t for name, t in inside.items() if not name.startswith(_OTHER_MODELS)}
    if refusal := _other_family(inside) or _quantized(inside, header.metadata):
        return refuse(*refusal)
    try:
        flux = sizes_of(inside)
    except KeyError as error:
        return refuse("incomplete", f"is no whole Flux (it lacks a well-formed {error.args[0]})", _WHOLE)
    channels = flux["in_channels"] // 4
    if channels == 96:
        return refuse("fill", "is FLUX.1 Fill (96 input channels, not 16), which cannot be trained yet")
    if channels == 32:
        return refuse("control", "is FLUX.1 Canny or Depth (32 input channels, not 16), which cannot be trained yet")
    if channels != 16 or flux["out_channels"] != 64:
        return refuse("other", f"is a variant of Flux with {channels} input channels instead of 16")
    if flux["hidden_size"] % HEAD_DIM or flux["mlp_ratio"] != 4:
        return refuse("other", f"is a variant of Flux of unknown sizes (width {flux['hidden_size']})")
    suffix = "weight" if any(name.endswith("_norm.weight") for name in inside) else "scale"
    info = FileInfo(path=str(path), kind="flux", prefix=prefix, norm_suffix=suffix)
    shapes = {info.tensor_name(name)[len(prefix) :]: shape for name, shape in shapes_of(flux).items()}
    missing = [name for name in shapes if name not in inside]
    if missing:
        lack = f"is no whole Flux (it lacks {len(missing)} of {len(shapes)} tensors: {missing[0]})"
        return refuse("incomplete", lack, _WHOLE)
    wrong = next((name for name, shape in shapes.items() if inside[name].shape != shape), None)
    if wrong:
        found = f"{list(inside[wrong].shape)} instead of {list(shapes[wrong])}"
        return refuse("other", f"is no Flux.1: {wrong} has the shape {found}")
    extra = [name for name in inside if name not in shapes]
    if sum(inside[name].numel for name in extra) >= STRAY:
        return refuse("other", f"is a variant of Flux with layers that are unknown here ({extra[0]})")
    if "kontext" in Path(path).name.lower():
        return refuse("kontext", "is FLUX.1 Kontext (by its file name), which cannot be trained yet")
    count = Counter[str]()
    for name in shapes:
        count[inside[name].dtype] += inside[name].numel
    unknown = sorted(set(count) - set(DTYPES))
    if unknown:
        return refuse("quantized", f"has weights of type {', '.join(unknown)}, which cannot be trained")
    return FileInfo(
        path=str(path), kind="flux", trainable=True, variant="dev" if flux["guidance_embed"] else "schnell",
        dtype=DTYPES[count.most_common(1)[0][0]], params=sum(count.values()), prefix=prefix, norm_suffix=suffix,
        all_in_one=any(name.startswith(_OTHER_MODELS) for name in names), flux=flux,
    )  # fmt: skip


_WHOLE = "if it is one part of several, get all in one file; else " + USE
_BLOCK = re.compile(r"(double|single)_blocks\.\d+\.")
_LORA = re.compile(r"(^|\.)lora_|\.(hada_w|lokr_w|dora_scale)")
_OTHER_MODELS = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.")


def _other_family(inside: dict[str, TensorInfo]) -> tuple[str, str] | None:
    """Kind and description of models that share Flux's blocks."""
    if any(name.startswith("double_stream_modulation_img.") for name in inside):
        return "flux2", "is FLUX.2, whose architecture is another and cannot be trained yet"
    if any(name.startswith(("distilled_guidance_layer.", "nerf_")) for name in inside):
        return "chroma", "is Chroma, whose architecture is another and cannot be trained yet"
    if any(name.startswith(("controlnet_", "input_hint_block.", "pos_embed_input.")) for name in inside):
        return "controlnet", "is a ControlNet for Flux, not the model itself"
    return None


def _quantized(inside: dict[str, TensorInfo], metadata: dict[str, str]) -> tuple[str, str] | None:
    """Kind and description of weights that were rounded to few bits."""
    dtypes = {t.dtype for name, t in inside.items() if name.endswith(".weight")}
    if any(".absmax" in name or "bitsandbytes" in name for name in inside):
        return "nf4", "has NF4 weights (bitsandbytes, 4 bits), which cannot be trained"
    marks = (".scale_weight", ".weight_scale", ".comfy_quant", "scaled_fp8")
    scaled = "_quantization_metadata" in metadata or any(name.endswith(marks) for name in inside)
    if any(dtype.startswith("F8_") for dtype in dtypes) and "U8" not in dtypes:
        return "fp8", f"has {'scaled ' if scaled else ''}fp8 weights (8 bits), which cannot be trained"
    if scaled or dtypes - set(DTYPES) - {"F64"} or any(name.endswith(".qweight") for name in inside):
        return "quantized", "has quantized weights, which cannot be trained"
    return None


def _no_flux(names: dict[str, TensorInfo]) -> tuple[str, str]:
    """Kind and description of a file without Flux's blocks."""
    if any(name.endswith(".qweight") for name in names):
        return "quantized", "has quantized weights, which cannot be trained"
    if any(".attn.to_qkv_mlp_proj." in name for name in names):
        return "flux2", "is FLUX.2 under diffusers' names, which cannot be trained yet"
    if any("transformer_blocks." in name and ".attn" in name for name in names):
        return "diffusers", "has diffusers' names; the same weights exist under Black Forest Labs' names in one file"
    for pattern, what in _OTHERS:
        if any(re.search(pattern, name) for name in names):
            return "other", f"is {what}, not a Flux"
    return "other", f"holds no Flux (its first tensor is {min(names)})" if names else "holds no tensors"


_OTHERS = (
    (r"(^|\.)input_blocks\.0\.0\.weight$", "a Stable Diffusion 1, 2 or XL checkpoint"),
    (r"(^|\.)joint_blocks\.0\.", "Stable Diffusion 3"),
    (r"(^|\.)redux_up\.", "the FLUX.1 Redux adapter"),
    (r"(^|\.)encoder\.block\.0\.layer\.", "a T5 text encoder"),
    (r"(^|\.)text_model\.encoder\.", "a CLIP text encoder"),
    (r"(^|\.)decoder\.(conv_in|up\.0|up_blocks\.0)\.", "a VAE"),
)


def fingerprint(path: str | os.PathLike[str], samples: int = 256, sample_bytes: int = 16 * 1024) -> str:
    """SHA-256 (hex) of a file's size, its header and ``samples`` evenly spread pieces: 4 MB read, of any size.

    Files up to that size are read whole. Tells one model from another, and a training from its origin; not a proof that
    no byte differs. Works for any file. Raises ``OSError`` if it cannot be read.
    """
    size = os.path.getsize(path)
    digest = hashlib.sha256(f"{size}\n".encode())
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        digest.update(start)
        if length <= MAX_HEADER and 8 + length <= size:
            digest.update(file.read(length))
        first = file.tell()
        if size - first <= samples * sample_bytes:
            digest.update(file.read())
        else:
            for i in range(samples):
                file.seek(first + math.floor((size - first - sample_bytes) * i / (samples - 1)))
                digest.update(file.read(sample_bytes))
    return digest.hexdigest()

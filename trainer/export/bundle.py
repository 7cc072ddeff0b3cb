"""The other parts of an all-in-one checkpoint: copies of the text encoders' and the VAE's tensors, dtypes kept.

Names as ComfyUI's own checkpoints have them (``comfy.supported_models.Flux``, tried on 0.3.64 and 0.33.0):
``model.diffusion_model.``, ``text_encoders.clip_l.``, ``text_encoders.t5xxl.``, ``vae.``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from ..config import ModelConfig
from ..header import Header, read_header
from ..weights import Entry, entry
from .reread import copies

MODEL = "model.diffusion_model."
_QUANTIZED = "_quantization_metadata"
_TELLING = {
    "clip_l": ("text_model.encoder.layers.0.mlp.fc1.weight",),
    "t5": ("encoder.block.0.layer.0.SelfAttention.k.weight",),
    "vae": ("decoder.conv_in.weight", "taesd_decoder.1.weight"),
}
"""Tensors of which one is in each kind of file."""
_CALLED = {"clip_l": "CLIP-L text encoder", "t5": "T5-XXL text encoder", "vae": "VAE"}


def companions(model: ModelConfig) -> list[Entry]:
    """The tensors of the model's text encoders and VAE under the names they have in a checkpoint.

    ``ValueError`` names the input where a file is missing or another than ComfyUI loads.
    """
    given = {"clip_l": model.clip_l, "t5": model.t5, "vae": model.vae}
    headers = {name: _header(name, path) for name, path in given.items()}
    # The two text encoders are taken in either order, as ComfyUI's own loader takes them.
    if _is("t5", headers["clip_l"]) and _is("clip_l", headers["t5"]):
        given["clip_l"], given["t5"] = given["t5"], given["clip_l"]
        headers["clip_l"], headers["t5"] = headers["t5"], headers["clip_l"]
    made: list[Entry] = []
    for kind, path in given.items():
        if not _is(kind, headers[kind]):
            raise ValueError(f"{kind} is {path}: this is no {_CALLED[kind]} that ComfyUI loads, choose another file, or"
                             " export the diffusion model alone")  # fmt: skip
        made += copies(Path(path), {name: _name(kind, name) for name in headers[kind].tensors})
        made += _layers(kind, headers[kind])
    return made


def _header(name: str, path: str) -> Header:
    if not path:
        raise ValueError(f"{name} is not chosen, and an all-in-one checkpoint needs it: choose its file in Flux Model"
                         " to Train, or export the diffusion model alone")  # fmt: skip
    try:
        return read_header(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is {path}: choose another file ({error})") from None


def _is(kind: str, header: Header) -> bool:
    return any(name in header.tensors for name in _TELLING[kind])


def _name(kind: str, name: str) -> str:
    if kind == "vae":
        return f"vae.{name}"
    inner = "" if name == "logit_scale" else "transformer."
    return f"text_encoders.{'t5xxl' if kind == 't5' else kind}.{inner}{name}"


def _layers(kind: str, header: Header) -> Iterable[Entry]:
    """What the metadata of a file says of quantized layers, as tensors: a checkpoint has one metadata for all."""
    if _QUANTIZED not in header.metadata:
        return
    for layer, form in json.loads(header.metadata[_QUANTIZED])["layers"].items():
        name = f"{layer}.comfy_quant"
        if name not in header.tensors:
            yield entry(_name(kind, name), torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8))

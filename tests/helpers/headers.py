"""Headers of model files at their real sizes, with holes for their data: 24 GB that take no room."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import struct
from pathlib import Path

from trainer.cli.main import main
from trainer.flux.diffusers_names import diffusers_shapes
from trainer.flux.model import FluxParams
from trainer.flux.sizes import shapes_of
from trainer.flux.variants import inspect_file, require_flux
from trainer.header import BITS

DEV = dataclasses.asdict(FluxParams())
SCHNELL = DEV | {"guidance_embed": False}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
ONE = ("BF16", (64, 64))
TEXT_AND_VAE: Tensors = {
    "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.weight": ("F8_E4M3", (4096, 4096)),
    "text_encoders.t5xxl.transformer.scaled_fp8": ("F8_E4M3", (0,)),
    "text_encoders.clip_l.transformer.text_model.embeddings.token_embedding.weight": ("F16", (49408, 768)),
    "vae.decoder.conv_in.weight": ("F32", (512, 16, 3, 3)),
}


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


def diffusers(sizes: dict = DEV, dtype: str = "BF16", prefix: str = "") -> Tensors:
    return {prefix + name: (dtype, shape) for name, shape in diffusers_shapes(sizes).items()}


def check_refusal(path: Path, kind: str, words: str) -> None:
    """It is named for what it is, in one line that names the file too; ``inspect`` says the same, and that it did."""
    info = inspect_file(path)
    assert (info.kind, info.trainable, info.flux) == (kind, False, None), info
    assert words in info.reason and str(path) in info.reason and "\n" not in info.reason, info.reason
    try:
        require_flux(path)
    except ValueError as error:
        assert str(error) == info.reason
    else:
        raise AssertionError("it was taken")
    code, said, failed = command("inspect", path)
    nothing = kind in ("missing", "unreadable")
    assert (code, said if not nothing else failed) == (2 if nothing else 0, " ".join(info.reason.split()) + "\n")
    code, said, _ = command("inspect", path, "--json")
    told = json.loads(said)
    assert (code, told["kind"], told["reason"]) == (2 if nothing else 0, kind, info.reason)


def command(*arguments: object) -> tuple[int, str, str]:
    """``python -m trainer`` in this process: its exit code, and what it wrote."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(each) for each in arguments])
    return code, out.getvalue(), err.getvalue()

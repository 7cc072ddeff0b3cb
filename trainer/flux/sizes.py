"""Sizes, names and shapes of a Flux's tensors, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..header import TensorInfo

HEAD_DIM, AXES_DIM = 128, (16, 56, 56)
"""Every Flux.1 has heads of 128, whose rotary axes no tensor tells."""


def sizes_of(inside: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The fields of ``model.FluxParams``, from the shapes of the tensors in a file.

    Raises ``KeyError`` with the name of a tensor that is needed and missing or no matrix.
    """

    def shape(name: str) -> tuple[int, ...]:
        if len(inside[name].shape) != 2 or not all(inside[name].shape):
            raise KeyError(name)
        return inside[name].shape

    def blocks(stack: str) -> int:
        return len({name.split(".")[1] for name in inside if re.match(rf"{stack}\.\d+\.", name)})

    depth, singles = blocks("double_blocks"), blocks("single_blocks")
    hidden, in_channels = shape("img_in.weight")
    if depth:
        mlp = shape("double_blocks.0.img_mlp.0.weight")[0]
    else:
        mlp = shape("single_blocks.0.linear1.weight")[0] - 3 * hidden
    return {
        "in_channels": in_channels,
        "out_channels": shape("final_layer.linear.weight")[0],
        "vec_in_dim": shape("vector_in.in_layer.weight")[1],
        "context_in_dim": shape("txt_in.weight")[1],
        "hidden_size": hidden,
        "mlp_ratio": mlp / hidden,
        "num_heads": hidden // HEAD_DIM,
        "depth": depth,
        "depth_single_blocks": singles,
        "axes_dim": AXES_DIM,
        "theta": 10_000,
        "qkv_bias": not depth or "double_blocks.0.img_attn.qkv.bias" in inside,
        "guidance_embed": "guidance_in.in_layer.weight" in inside,
    }


def shapes_of(flux: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of ``model.Flux`` with the sizes ``flux``, in the model's order."""
    dim, mlp = flux["hidden_size"], int(flux["hidden_size"] * flux["mlp_ratio"])
    out: dict[str, tuple[int, ...]] = {}

    def linear(name: str, into: int, outof: int, bias: bool = True) -> None:
        out[f"{name}.weight"] = (outof, into)
        if bias:
            out[f"{name}.bias"] = (outof,)

    def embedder(name: str, into: int) -> None:
        linear(f"{name}.in_layer", into, dim)
        linear(f"{name}.out_layer", dim, dim)

    def norms(name: str) -> None:
        out.update({f"{name}.norm.{which}_norm.scale": (HEAD_DIM,) for which in ("query", "key")})

    linear("img_in", flux["in_channels"], dim)
    embedder("time_in", 256)
    embedder("vector_in", flux["vec_in_dim"])
    if flux["guidance_embed"]:
        embedder("guidance_in", 256)
    linear("txt_in", flux["context_in_dim"], dim)
    for i in range(flux["depth"]):
        for stream in (f"double_blocks.{i}.img", f"double_blocks.{i}.txt"):
            linear(f"{stream}_mod.lin", dim, 6 * dim)
            linear(f"{stream}_attn.qkv", dim, 3 * dim, flux["qkv_bias"])
            norms(f"{stream}_attn")
            linear(f"{stream}_attn.proj", dim, dim)
            linear(f"{stream}_mlp.0", dim, mlp)
            linear(f"{stream}_mlp.2", mlp, dim)
    for i in range(flux["depth_single_blocks"]):
        block = f"single_blocks.{i}"
        linear(f"{block}.linear1", dim, 3 * dim + mlp)
        linear(f"{block}.linear2", dim + mlp, dim)
        norms(block)
        linear(f"{block}.modulation.lin", dim, 3 * dim)
    linear("final_layer.linear", dim, flux["out_channels"])
    linear("final_layer.adaLN_modulation.1", dim, 2 * dim)
    return out

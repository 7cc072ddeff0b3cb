"""The names that diffusers gives to a Flux's tensors, against Black Forest Labs', which are ours. Without torch.

diffusers keeps query, key and value apart, which are one matrix here; so are the two that a single block multiplies
its input with. Its last modulation gives scale, then shift, where ours gives shift, then scale. Both read off
diffusers' ``scripts/convert_flux_to_diffusers.py`` and checked against its ``FluxTransformer2DModel``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..header import TensorInfo
from .sizes import shapes_of


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor in a file: a parameter of ours is one such run, or several below each other."""

    name: str
    start: int
    stop: int


ONE_TO_ONE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
_DOUBLE = {
    "img_mod.lin": ("norm1.linear",),
    "txt_mod.lin": ("norm1_context.linear",),
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn.norm.query_norm": ("attn.norm_q",),
    "img_attn.norm.key_norm": ("attn.norm_k",),
    "txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "img_attn.proj": ("attn.to_out.0",),
    "txt_attn.proj": ("attn.to_add_out",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
}
_SINGLE = {
    "modulation.lin": ("norm.linear",),
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "norm.query_norm": ("attn.norm_q",),
    "norm.key_norm": ("attn.norm_k",),
}
_BLOCK = re.compile(r"(double|single)_blocks\.(\d+)\.(.+)")


def modules(module: str) -> tuple[str, ...]:
    """diffusers' modules that make up one of ours, in the order of its rows: ``double_blocks.0.img_attn.qkv``."""
    found = _BLOCK.fullmatch(module)
    if not found:
        return (ONE_TO_ONE[module],)
    stack, index, inner = found.groups()
    table, name = (_DOUBLE, "transformer_blocks") if stack == "double" else (_SINGLE, "single_transformer_blocks")
    return tuple(f"{name}.{index}.{each}" for each in table[inner])


def theirs(parameter: str) -> str:
    """diffusers' name of a parameter of ours, or of the first of its parts."""
    module, _, kind = parameter.rpartition(".")
    return f"{modules(module)[0]}.{'weight' if kind == 'scale' else kind}"


def rows_of(parameter: str, shape: tuple[int, ...], flux: Mapping[str, Any]) -> tuple[Rows, ...]:
    """Where the rows of a parameter of ``model.Flux`` lie in a file with diffusers' names, from its first to its last.

    ``shape``: that of the parameter.
    """
    module, _, kind = parameter.rpartition(".")
    kind = "weight" if kind == "scale" else kind
    names = modules(module)
    if module == "final_layer.adaLN_modulation.1":
        half = shape[0] // 2
        name = f"{names[0]}.{kind}"
        return Rows(name, half, 2 * half), Rows(name, 0, half)
    if len(names) == 1:
        return (Rows(f"{names[0]}.{kind}", 0, shape[0]),)
    dim = flux["hidden_size"]
    sizes = (dim, dim, dim, shape[0] - 3 * dim)
    return tuple(Rows(f"{name}.{kind}", 0, size) for name, size in zip(names, sizes, strict=False))


def diffusers_shapes(flux: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a Flux with the sizes ``flux`` under diffusers' names."""
    found: dict[str, tuple[int, ...]] = {}
    for parameter, shape in shapes_of(flux).items():
        for rows in rows_of(parameter, shape, flux):
            found[rows.name] = (max(rows.stop, found.get(rows.name, (0,))[0]), *shape[1:])
    return found


def as_ours(inside: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors from which ``sizes_of`` reads the sizes, under our names, from a table with diffusers' names."""
    found: dict[str, TensorInfo] = {}
    for ours, theirs in ONE_TO_ONE.items():
        found |= {f"{ours}.{k}": inside[f"{theirs}.{k}"] for k in ("weight", "bias") if f"{theirs}.{k}" in inside}
    for name, tensor in inside.items():
        block = re.match(r"(single_)?transformer_blocks\.(\d+)\.", name)
        if block:
            found[f"{'single' if block[1] else 'double'}_blocks.{block[2]}."] = tensor
    for ours, theirs in {
        "double_blocks.0.img_mlp.0.weight": "transformer_blocks.0.ff.net.0.proj.weight",
        "double_blocks.0.img_attn.qkv.bias": "transformer_blocks.0.attn.to_q.bias",
    }.items():
        if theirs in inside:
            found[ours] = inside[theirs]
    return found

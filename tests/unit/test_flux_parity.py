"""Our Flux against diffusers' FluxTransformer2DModel on the same random weights, in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trainer.flux.model import TINY, Flux, FluxParams, patchify, unpatchify

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: no independent Flux to compare with")

TOLERANCE = 1e-5
"""Largest absolute difference, as a share of the output's largest absolute value."""

SIZES = {
    "dev": TINY,
    "schnell": dataclasses.replace(TINY, guidance_embed=False),
    "deeper": dataclasses.replace(TINY, hidden_size=256, num_heads=2, depth=3, depth_single_blocks=4),
}


def random_flux(params: FluxParams, seed: int = 0) -> Flux:
    """Random weights at which every part of the model matters: biases and norm scales too."""
    model = Flux(params)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(".scale"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.1 if parameter.ndim == 1 else parameter.shape[1] ** -0.5))
    return model


def random_inputs(params: FluxParams, h: int = 10, w: int = 14, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(batch, params.in_channels // 4, h, w, generator=generator),
        "timestep": torch.linspace(0.13, 0.87, batch),
        "context": torch.randn(batch, 7, params.context_in_dim, generator=generator),
        "pooled": torch.randn(batch, params.vec_in_dim, generator=generator),
        "guidance": torch.linspace(1.0, 3.5, batch),
    }


def to_diffusers(model: Flux) -> dict[str, torch.Tensor]:
    """The state dict under diffusers' names: q, k, v apart, and scale before shift in the last layer."""
    out = {}
    plain = {
        "img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out",
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    }
    double = {
        "img_mod.lin": "norm1.linear", "txt_mod.lin": "norm1_context.linear",
        "img_attn.proj": "attn.to_out.0", "txt_attn.proj": "attn.to_add_out",
        "img_mlp.0": "ff.net.0.proj", "img_mlp.2": "ff.net.2",
        "txt_mlp.0": "ff_context.net.0.proj", "txt_mlp.2": "ff_context.net.2",
        "img_attn.norm.query_norm": "attn.norm_q", "img_attn.norm.key_norm": "attn.norm_k",
        "txt_attn.norm.query_norm": "attn.norm_added_q", "txt_attn.norm.key_norm": "attn.norm_added_k",
        "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    }
    single = {
        "modulation.lin": "norm.linear", "linear2": "proj_out", "norm.query_norm": "attn.norm_q",
        "norm.key_norm": "attn.norm_k", "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    }
    dim = model.params.hidden_size
    for name, value in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        kind = "weight" if kind == "scale" else kind
        if stem == "final_layer.adaLN_modulation.1":
            shift, scale = value.chunk(2)
            out[f"norm_out.linear.{kind}"] = torch.cat((scale, shift))
            continue
        prefix, target = "", plain.get(stem)
        if target is None:
            stack, index, rest = stem.split(".", 2)
            prefix = ("transformer_blocks" if stack == "double_blocks" else "single_transformer_blocks") + f".{index}."
            target = (double if stack == "double_blocks" else single)[rest]
        if isinstance(target, str):
            out[f"{prefix}{target}.{kind}"] = value
        else:
            parts = value.split([dim] * 3 + [value.shape[0] - 3 * dim] * (len(target) - 3))
            out.update({f"{prefix}{t}.{kind}": part for t, part in zip(target, parts, strict=True)})
    return out


def diffusers_flux(model: Flux):
    p = model.params
    theirs = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=p.in_channels, out_channels=p.out_channels, num_layers=p.depth,
        num_single_layers=p.depth_single_blocks, attention_head_dim=sum(p.axes_dim), num_attention_heads=p.num_heads,
        joint_attention_dim=p.context_in_dim, pooled_projection_dim=p.vec_in_dim, guidance_embeds=p.guidance_embed,
        axes_dims_rope=p.axes_dim,
    )
    theirs.load_state_dict(to_diffusers(model), strict=True)
    return theirs


def run_diffusers(theirs, params: FluxParams, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    h, w = inputs["x"].shape[-2:]
    image_ids = torch.zeros(h // 2, w // 2, 3)
    image_ids[..., 1] += torch.arange(h // 2)[:, None]
    image_ids[..., 2] += torch.arange(w // 2)[None]
    tokens = theirs(
        hidden_states=patchify(inputs["x"]), encoder_hidden_states=inputs["context"],
        pooled_projections=inputs["pooled"], timestep=inputs["timestep"], img_ids=image_ids.flatten(0, 1),
        txt_ids=torch.zeros(inputs["context"].shape[1], 3),
        guidance=inputs["guidance"] if params.guidance_embed else None,
    ).sample
    return unpatchify(tokens, h, w)


@pytest.mark.parametrize("size", SIZES)
def test_forward_equals_diffusers(size: str) -> None:
    params = SIZES[size]
    ours, inputs = random_flux(params), random_inputs(params)
    with torch.no_grad():
        expected = run_diffusers(diffusers_flux(ours), params, inputs)
        actual = ours(**inputs)
    scale = expected.abs().max()
    assert scale > 0.1
    assert (actual - expected).abs().max() < TOLERANCE * scale


@pytest.mark.parametrize("part", ["timestep", "context", "pooled", "guidance"])
def test_the_comparison_would_see_a_wrong_input(part: str) -> None:
    """The tolerance is no blanket: a change of one input by one part in a thousand exceeds it."""
    ours, inputs = random_flux(TINY), random_inputs(TINY)
    with torch.no_grad():
        before = ours(**inputs)
        after = ours(**{**inputs, part: inputs[part] * 1.001})
    assert (after - before).abs().max() > TOLERANCE * before.abs().max()


def test_gradients_equal_diffusers() -> None:
    """Every parameter's gradient, through our names and theirs, in float64."""
    ours = random_flux(TINY).double()
    inputs = {k: v.double() for k, v in random_inputs(TINY).items()}
    theirs = diffusers_flux(ours).double()
    ours(**inputs).square().mean().backward()
    run_diffusers(theirs, TINY, inputs).square().mean().backward()
    gradients = Flux(TINY).double()
    gradients.load_state_dict({name: p.grad for name, p in ours.named_parameters()})
    expected = to_diffusers(gradients)
    for name, parameter in theirs.named_parameters():
        scale = expected[name].abs().max()
        assert scale > 0, name
        assert (parameter.grad - expected[name]).abs().max() < 1e-5 * scale, name

"""Our Flux by itself: its parts, its dtypes, its gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trainer.flux.model import (
    TINY,
    Flux,
    FluxParams,
    build_meta,
    init_weights_,
    patchify,
    trainable_dtype,
    unpatchify,
)

SCHNELL = dataclasses.replace(TINY, guidance_embed=False)
TWO_HEADS = dataclasses.replace(TINY, hidden_size=256, num_heads=2, depth=2, depth_single_blocks=3)


def made(params: FluxParams = TINY, base: torch.dtype = torch.float32, seed: int = 0) -> Flux:
    """A Flux in training's dtypes whose biases and scales are random too, so that nothing hides behind a zero."""
    model = init_weights_(build_meta(params, base).to_empty(device="cpu"), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs(params: FluxParams = TINY, h: int = 6, w: int = 10, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(batch, 16, h, w, generator=generator),
        "timestep": torch.linspace(0.2, 0.9, batch),
        "context": torch.randn(batch, 5, params.context_in_dim, generator=generator),
        "pooled": torch.randn(batch, params.vec_in_dim, generator=generator),
        "guidance": torch.linspace(1.0, 4.0, batch),
    }


def to(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: v.to(dtype) for k, v in tensors.items()}


def test_the_size_of_flux_dev() -> None:
    model = build_meta(FluxParams(), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 11_901_408_320
    assert sum(p.numel() for p in model.double_blocks[0].parameters()) == 339_831_296
    assert sum(p.numel() for p in model.single_blocks[0].parameters()) == 141_591_808
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in build_meta(FluxParams(guidance_embed=False)).parameters()) == 11_891_178_560


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_is_trained_in_float32(base: torch.dtype) -> None:
    wide = torch.float64 if base == torch.float64 else torch.float32
    found = {name: p.dtype for name, p in build_meta(TINY, base).named_parameters()}
    in_wide = [n for n in found if n.startswith(("final_layer.", "img_in.")) or n.endswith((".bias", ".scale"))]
    assert all(found[n] == (wide if n in in_wide else base) == trainable_dtype(n, base) for n in found)
    assert "double_blocks.0.img_attn.norm.query_norm.scale" in in_wide and "txt_in.weight" not in in_wide


@pytest.mark.parametrize("params", [TINY, SCHNELL, TWO_HEADS], ids=["tiny", "schnell", "two heads"])
@pytest.mark.parametrize("base", [torch.float64, torch.float32, torch.bfloat16])
def test_every_parameter_has_a_gradient_in_its_own_dtype(params: FluxParams, base: torch.dtype) -> None:
    model = made(params, base)
    model(**inputs(params)).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, name
        assert parameter.grad.isfinite().all() and (parameter.grad != 0).float().mean() > 0.99, name


def test_gradients_are_those_of_finite_differences() -> None:
    model, data = made(TINY, torch.float64), to(inputs(h=4, w=4, batch=1), torch.float64)
    target = torch.randn(1, 16, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def loss() -> torch.Tensor:
        return (model(**data) - target).square().mean()

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        expected, step = (parameter.grad * direction).sum().item(), 1e-5
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = loss().item()
            parameter.sub_(direction, alpha=2 * step)
            below = loss().item()
            parameter.add_(direction, alpha=step)
        assert (above - below) / (2 * step) == pytest.approx(expected, rel=1e-4, abs=1e-9), name


@pytest.mark.parametrize(("base", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_lower_precisions_agree_with_float64(base: torch.dtype, tolerance: float) -> None:
    """Output and gradients for the weights of the lower precision; root mean square of the difference."""
    low = made(TWO_HEADS, base)
    high = build_meta(TWO_HEADS, torch.float64).to_empty(device="cpu")
    high.load_state_dict(low.state_dict())
    data = inputs(TWO_HEADS)
    results = []
    for model in (low, high):
        out = model(**data)
        assert out.dtype == model.dtype
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        (out.double() * weight).mean().backward()
        results.append({"out": out.detach().double()} | {n: p.grad.double() for n, p in model.named_parameters()})
    for name, expected in results[1].items():
        error = (results[0][name] - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < tolerance, (name, error)


def test_the_parts_called_one_by_one_are_the_whole() -> None:
    model, data = made(TWO_HEADS), inputs(TWO_HEADS, h=5, w=7)
    with torch.no_grad():
        expected = model(**data)
        tokens = patchify(data["x"])
        img, txt, vec = model.embed(tokens, data["context"], data["timestep"], data["pooled"], data["guidance"])
        assert (img.shape, txt.shape, vec.shape) == ((2, 12, 256), (2, 5, 256), (2, 256))
        pe = model.rope(5, 7, txt.shape[1], img.device)
        assert pe.dtype == torch.float32
        before = [t.clone() for t in (tokens, img, txt, vec, pe)]
        start = img, txt
        for block in model.double_blocks:
            img, txt = block(img, txt, vec, pe)
        x = torch.cat((txt, img), 1)
        for block in model.single_blocks:
            kept = x
            copy = x.clone()
            x = block(x, vec, pe)
            assert torch.equal(kept, copy)
        out = model.final_layer(x[:, txt.shape[1] :], vec)
        assert torch.equal(unpatchify(out, 5, 7), expected)
        after = (tokens, *start, vec, pe)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "written in place"


def test_the_last_layer_keeps_float32_under_bf16() -> None:
    model = made(TINY, torch.bfloat16)
    out = model.final_layer(torch.randn(1, 4, 128).bfloat16(), torch.randn(1, 128).bfloat16())
    assert out.dtype == torch.float32 and not torch.equal(out, out.bfloat16().float())
    assert model(**inputs()).dtype == torch.bfloat16


def test_schnell_ignores_guidance_and_dev_can_do_without() -> None:
    data = inputs()
    schnell = made(SCHNELL)
    with torch.no_grad():
        assert torch.equal(schnell(**data), schnell(**{**data, "guidance": None}))
        dev = made(TINY)
        without = dev(**{**data, "guidance": None})
        assert without.isfinite().all() and not torch.equal(without, dev(**data))


def test_pictures_of_a_batch_do_not_mix() -> None:
    model, data = made(TWO_HEADS), inputs(TWO_HEADS, batch=3)
    with torch.no_grad():
        together = model(**data)
        for i in range(3):
            alone = model(**{k: v[i : i + 1] for k, v in data.items()})
            assert torch.allclose(together[i : i + 1], alone, atol=1e-5)


@pytest.mark.parametrize(("h", "w"), [(4, 6), (5, 6), (4, 7), (5, 7), (2, 2)])
def test_patches_there_and_back(h: int, w: int) -> None:
    x = torch.arange(2 * 3 * h * w, dtype=torch.float32).view(2, 3, h, w)
    tokens = patchify(x)
    rows, columns = -(-h // 2), -(-w // 2)
    assert tokens.shape == (2, rows * columns, 12)
    assert torch.equal(unpatchify(tokens, h, w), x)
    # the layout of Black Forest Labs: channel, then row, then column of the patch; an odd side goes round
    for token in (0, columns - 1, rows * columns - 1):
        row, column = divmod(token, columns)
        corners = [((2 * row + i) % h, (2 * column + j) % w) for i in (0, 1) for j in (0, 1)]
        expected = [x[1, c, i, j] for c in range(3) for i, j in corners]
        assert tokens[1, token].tolist() == expected


def test_rope_against_the_formula() -> None:
    model = build_meta(TINY)
    pe = model.rope(5, 8, 3, "cpu")
    assert pe.shape == (3 + 3 * 4, 64, 2)
    assert torch.equal(pe[:3, :, 0], torch.ones(3, 64)) and torch.equal(pe[:3, :, 1], torch.zeros(3, 64))
    row, column = 2, 3
    angle = [0.0] * 8 + [row / 10_000 ** (2 * i / 56) for i in range(28)]
    angle += [column / 10_000 ** (2 * i / 56) for i in range(28)]
    angles = torch.tensor(angle, dtype=torch.float64)
    assert torch.equal(pe[3 + row * 4 + column], torch.stack((angles.cos(), angles.sin()), -1).float())


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, again, other = made(seed=5), made(seed=5), made(seed=6)
    low = init_weights_(build_meta(TINY, torch.bfloat16).to_empty(device="cpu"), 5)
    plain = init_weights_(Flux(TINY), 5)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        assert not torch.equal(parameter, other.get_parameter(name)), name
        assert torch.equal(plain.get_parameter(name).to(low.get_parameter(name).dtype), low.get_parameter(name)), name
    state = torch.get_rng_state()
    init_weights_(Flux(TINY), 0)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"


def test_a_fresh_flux_is_near_the_identity_but_alive() -> None:
    model = init_weights_(Flux(TINY), 0)
    with torch.no_grad():
        out = model(**inputs())
    assert 1e-3 < out.std() < 1
    model(**inputs()).square().mean().backward()
    assert all((p.grad != 0).any() for p in model.parameters())

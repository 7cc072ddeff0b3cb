"""Exports in scaled fp8."""

from __future__ import annotations

import pytest
import torch
from exports import write
from safetensors.torch import load_file
from states import exact

from trainer.export.fp8 import is_quantized, scaled_entries
from trainer.weights import Entry, entry


def test_scaled_fp8_is_near_and_leaves_the_ends_alone(trained, tmp_path):
    run, trainer = trained
    write(run, tmp_path / "a.safetensors", trainer, dtype="fp8")
    file, wanted = load_file(tmp_path / "a.safetensors"), exact(trainer)
    assert file["scaled_fp8"].dtype == torch.float8_e4m3fn and file["scaled_fp8"].numel() == 2
    for name, value in wanted.items():
        scale = file.pop(name.removesuffix(".weight") + ".scale_weight", None)
        if not is_quantized(name, value.shape):
            assert scale is None and torch.equal(file[name], value.bfloat16()), name
            continue
        assert scale is not None and scale.shape == () and scale.dtype == torch.float32
        assert file[name].dtype == torch.float8_e4m3fn
        assert float(scale) == pytest.approx(float(value.abs().max()) / 448, rel=1e-6)
        found = file[name].float() * scale
        # Half a step of the 3 bits behind the leading one, or half of the smallest number.
        assert bool(((found - value).abs() <= (value.abs() / 16).clamp(min=float(scale) * 2**-10 * 1.001)).all()), name
    assert sum(is_quantized(n, v.shape) for n, v in wanted.items()) == 13
    assert not is_quantized("img_in.weight", (128, 64)) and not is_quantized("final_layer.linear.weight", (64, 128))


def test_the_scale_is_of_use():
    """Weights as small as those of a wide Flux: a bare cast has two or three bits left for them."""
    value = 0.01 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    _, scale, matrix = scaled_entries([entry("single_blocks.0.linear1.weight", value)])
    found = next(iter(matrix.chunks())).float() * next(iter(scale.chunks()))
    bare = value.to(torch.float8_e4m3fn).float()
    assert (found - value).square().mean() < (bare - value).square().mean() / 3


def test_fp8_of_nothing_and_of_nonsense():
    zero = scaled_entries([Entry("double_blocks.0.a.weight", "F32", (2, 3), lambda: iter((torch.zeros(2, 3),)))])
    values = {e.name: torch.cat([c.flatten().float() for c in e.chunks()]) for e in zero}
    assert values["double_blocks.0.a.scale_weight"].tolist() == [1.0]
    assert values["double_blocks.0.a.weight"].tolist() == [0.0] * 6
    least = torch.tensor([[6e-43, -4e-43, 0.0, 2e-45]])  # their scale is hardly a number
    for value in (least, least / 100):
        _, scale, matrix = scaled_entries([entry("single_blocks.0.a.weight", value)])
        found = next(iter(matrix.chunks())).float() * next(iter(scale.chunks()))
        assert bool(((found - value).abs() < 3e-43).all())
    bad = scaled_entries([entry("single_blocks.0.a.weight", torch.tensor([[1.0, float("nan")]]))])
    with pytest.raises(ValueError, match="single_blocks.0.a.weight has values that are not finite"):
        list(bad[1].chunks())

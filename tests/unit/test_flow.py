"""Noise levels, losses and schedules against formulas written out by hand."""

import math

import pytest
import torch

from trainer import flow
from trainer.config import RecipeConfig


def test_flux_shift_has_the_published_ends():
    assert flow.flux_shift(32, 32) == pytest.approx(0.5)  # 256 tokens: 256 px
    assert flow.flux_shift(128, 128) == pytest.approx(1.15)  # 4096 tokens: 1024 px
    assert flow.flux_shift(31, 63) == flow.flux_shift(32, 64) > flow.flux_shift(30, 62)  # half a token is one


@pytest.mark.parametrize("sampling", ["flux_shift", "shift", "sigmoid", "uniform"])
def test_noise_levels_follow_their_distribution(sampling):
    recipe = RecipeConfig(timestep_sampling=sampling, shift=3.0)
    t = torch.tensor([flow.timestep(recipe, (128, 128), 5, i) for i in range(4000)], dtype=torch.float64)
    assert ((t > 0) & (t < 1)).all()
    if sampling == "uniform":
        assert t.mean() == pytest.approx(0.5, abs=0.02) and t.var() == pytest.approx(1 / 12, rel=0.05)
        return
    # Undo shift and sigmoid by hand: a standard normal must be left.
    factor = {"flux_shift": math.exp(1.15), "shift": 3.0, "sigmoid": 1.0}[sampling]
    normal = torch.log(t / (1 - t)) - math.log(factor)
    assert normal.mean() == pytest.approx(0, abs=0.06) and normal.std() == pytest.approx(1, abs=0.05)


def test_noise_is_a_function_of_its_counters():
    a, b = flow.noise_like((16, 8, 8), 1, 0, 5, 2), flow.noise_like((16, 8, 8), 1, 0, 5, 2)
    assert torch.equal(a, b)
    assert not torch.equal(a, flow.noise_like((16, 8, 8), 1, 1, 5, 2))
    assert flow.timestep(RecipeConfig(), (8, 8), 1) != flow.timestep(RecipeConfig(), (8, 8), 2)


def test_noised_is_a_straight_line_and_its_target_the_slope():
    x, e = torch.randn(2, 16, 4, 4), torch.randn(2, 16, 4, 4)
    t = torch.tensor([0.0, 1.0])
    at, v = flow.noised(x, e, t)
    assert torch.equal(at[0], x[0]) and torch.equal(at[1], e[1])
    assert torch.equal(v, e - x)
    # One Euler step from pure noise along the true velocity lands on the picture.
    assert torch.allclose(e - v, x, atol=1e-6)


def test_losses():
    p, t = torch.tensor([[0.0, 0.05], [1.0, 3.0]]), torch.zeros(2, 2)
    assert flow.sample_losses(p, t, RecipeConfig(loss="l2")).tolist() == pytest.approx([0.0025 / 2, 5.0])
    huber = flow.sample_losses(p, t, RecipeConfig(loss="huber", huber_delta=0.1)).tolist()
    assert huber == pytest.approx([0.00125 / 2, (0.1 * 0.95 + 0.1 * 2.95) / 2])
    smooth = flow.sample_losses(p, t, RecipeConfig(loss="smooth_l1", huber_delta=0.1)).tolist()
    assert smooth == pytest.approx([0.0125 / 2, (0.95 + 2.95) / 2])


def test_dropout_share():
    drops = [flow.is_dropped(0.25, 3, i) for i in range(4000)]
    assert sum(drops) / 4000 == pytest.approx(0.25, abs=0.03)
    assert not any(flow.is_dropped(0.0, i) for i in range(100)) and all(flow.is_dropped(1.0, i) for i in range(100))


def test_learning_rate_schedules():
    rate = lambda step, **k: flow.learning_rate(2.0, RecipeConfig(**k), step)  # noqa: E731
    assert rate(1) == rate(10**6) == 2.0
    assert [rate(s, warmup_steps=4) for s in (1, 2, 3, 4, 5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    linear = {"lr_schedule": "linear", "warmup_steps": 2, "schedule_steps": 12, "lr_floor": 0.1}
    assert [rate(s, **linear) for s in (1, 2, 7, 12, 99)] == pytest.approx([1.0, 2.0, 1.1, 0.2, 0.2])
    cosine = {"lr_schedule": "cosine", "schedule_steps": 10}
    assert [rate(s, **cosine) for s in (0, 5, 10, 500)] == pytest.approx([2.0, 1.0, 0.0, 0.0])

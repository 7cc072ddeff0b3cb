"""Rectified flow: noise levels, noise, target and loss.

A sample at noise level ``t`` is ``x_t = (1 - t) x_0 + t e`` and the model learns the velocity
``e - x_0`` (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024, arXiv 2403.03206).

Randomness is counted, not drawn: every number is a function of (seed, counters), so that
micro-batches, resuming and the device change nothing and no step repeats another's noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import RecipeConfig

PATCH = 2
"""Side in latent pixels of what Flux sees as one token."""


def generator(*counters: int | str) -> torch.Generator:
    """A CPU random generator that depends on all ``counters`` and nothing else."""
    digest = hashlib.blake2b(repr(counters).encode(), digest_size=8).digest()
    # Signed, positive 63 bits: what every torch version accepts.
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def noise_like(shape: Sequence[int], *counters: int | str) -> Tensor:
    """Standard normal float32 noise of ``shape`` for these counters (on the CPU, the same on every machine)."""
    return torch.randn(tuple(shape), generator=generator("noise", *counters))


def flux_shift(latent_height: int, latent_width: int) -> float:
    """The exponent ``mu`` by which FLUX.1 shifts its noise levels at this size.

    Linear in the number of image tokens: 0.5 at 256, 1.15 at 4096 (Black Forest Labs, ``sampling.py``).
    """
    tokens = math.ceil(latent_height / PATCH) * math.ceil(latent_width / PATCH)
    return 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)


def shifted(t: Tensor | float, shift: float) -> Tensor | float:
    """Move noise levels ``t`` in [0, 1] towards 1 by a factor ``shift`` in odds: s t / (1 + (s - 1) t)."""
    return shift * t / (1 + (shift - 1) * t)


def timestep(recipe: RecipeConfig, latent_shape: Sequence[int], *counters: int | str) -> float:
    """One noise level in (0, 1) for a latent of ``latent_shape`` (..., h, w), by ``recipe.timestep_sampling``."""
    g = generator("timestep", *counters)
    if recipe.timestep_sampling == "uniform":
        return float(torch.rand((), generator=g, dtype=torch.float64))
    t = float(torch.sigmoid(torch.randn((), generator=g, dtype=torch.float64)))
    if recipe.timestep_sampling == "flux_shift":
        return float(shifted(t, math.exp(flux_shift(latent_shape[-2], latent_shape[-1]))))
    if recipe.timestep_sampling == "shift":
        return float(shifted(t, recipe.shift))
    return t


def fixed_timesteps(count: int) -> list[float]:
    """``count`` noise levels spread evenly over (0, 1): for losses that can be compared between steps."""
    return [(i + 0.5) / count for i in range(count)]


def fixed_evaluations(samples: int, most: int, levels: int = 16) -> list[tuple[int, int]]:
    """Which of so many samples are measured at which of ``levels`` noise levels: ``most`` pairs at most.

    Spread over both, and always the same. Of few samples each is measured at several levels, each once.
    """
    count = min(most, levels * samples)
    # Neighbours in a folder are often alike: 7 levels lie between them, and 11 between two of one sample.
    if count <= samples:
        return [(i * samples // count, i * 7 % levels) for i in range(count)]
    return [(i % samples, (i % samples * 7 + i // samples * 11) % levels) for i in range(count)]


def is_dropped(share: float, *counters: int | str) -> bool:
    """Whether this sample trains with an empty caption, for a dropout ``share`` in 0..1."""
    return share > 0 and float(torch.rand((), generator=generator("dropout", *counters))) < share


def noised(latent: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The model's input and its target velocity, both float32 like ``latent`` [B, C, h, w]; ``t`` [B]."""
    t = t.view(-1, 1, 1, 1)
    return torch.lerp(latent, noise, t), noise - latent


def sample_losses(predicted: Tensor, target: Tensor, recipe: RecipeConfig, weight: Tensor | None = None) -> Tensor:
    """Mean loss of each sample, float32 [B].

    ``weight`` [B, 1, h, w] is a factor of the loss at each latent pixel. The mean stays over all pixels: a mask takes
    away, it does not make what is left count for more.
    """
    predicted, target = predicted.float(), target.float()
    if recipe.loss == "l2":
        each = F.mse_loss(predicted, target, reduction="none")
    elif recipe.loss == "huber":
        each = F.huber_loss(predicted, target, reduction="none", delta=recipe.huber_delta)
    else:
        each = F.smooth_l1_loss(predicted, target, reduction="none", beta=recipe.huber_delta)
    if weight is not None:
        each = each * weight
    return each.flatten(1).mean(1)


def learning_rate(lr: float, recipe: RecipeConfig, step: int) -> float:
    """The learning rate of update number ``step`` (from 1), for a peak of ``lr``.

    Warm-up is linear and reaches the peak at ``warmup_steps``; a decaying schedule ends at
    ``schedule_steps``, at ``lr_floor`` times the peak, and stays there.
    """
    if step < recipe.warmup_steps:
        return lr * step / recipe.warmup_steps
    if recipe.lr_schedule == "constant":
        return lr
    span = recipe.schedule_steps - recipe.warmup_steps
    done = min(max(step - recipe.warmup_steps, 0) / span, 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if recipe.lr_schedule == "cosine" else 1 - done
    return lr * (recipe.lr_floor + (1 - recipe.lr_floor) * left)

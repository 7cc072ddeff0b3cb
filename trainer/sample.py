"""A plain Euler sampler for rectified flow, for where ComfyUI's samplers are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .flow import flux_shift, shifted

Predict = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(x [B, C, h, w], timestep [B], context [B, T, D], pooled [B, P], guidance [B] or None) -> velocity like x."""


def schedule(steps: int, latent_height: int, latent_width: int) -> list[float]:
    """``steps + 1`` noise levels from 1 to 0, shifted by size as FLUX.1 samples (see ``flow.flux_shift``)."""
    shift = math.exp(flux_shift(latent_height, latent_width))
    return [float(shifted(1 - i / steps, shift)) for i in range(steps + 1)]


def euler(
    predict: Predict, noise: Tensor, context: Tensor, pooled: Tensor, *, steps: int, guidance: float | None = None
) -> Tensor:
    """Integrate the flow from ``noise`` [B, 16, h, w] (noise level 1) to a latent in model space (level 0)."""
    levels = schedule(steps, *noise.shape[-2:])
    x, batch = noise, len(noise)
    told = None if guidance is None else torch.full((batch,), guidance)
    for now, after in zip(levels, levels[1:], strict=False):
        x = x + (after - now) * predict(x, torch.full((batch,), now), context, pooled, told)
    return x

"""An engine with random weights, made on the device, and random data: no file is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer.cli.plan import preset as preset_info
from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig
from trainer.data.batches import Dataset
from trainer.flux.model import PRESETS, FluxParams
from trainer.loop import Trainer
from trainer.memory import machine, plan
from trainer.memory.arena import CHUNK
from trainer.memory.streams import Streams
from trainer.walk import Stage

TEXT_TOKENS = 512


class RandomData(Dataset):
    """Random latents and captions of one size, made when asked for."""

    def __init__(self, params: FluxParams, resolution: int, text_tokens: int, samples: int):
        self.params, self.text_tokens = params, text_tokens
        self.shapes = [(resolution // 8, resolution // 8)] * samples
        self.repeats = None

    def latents(self, indices: Sequence[int], flipped: Sequence[bool] | None = None) -> Tensor:
        return torch.stack([torch.randn(16, *self.shapes[i], generator=_seeded(i)) for i in indices])

    def captions(
        self, indices: Sequence[int], dropped: Sequence[bool], chosen: Sequence[float] | None = None
    ) -> tuple[Tensor, Tensor]:
        p = self.params
        context = [torch.randn(self.text_tokens, p.context_in_dim, generator=_seeded(i)) for i in indices]
        pooled = [torch.randn(p.vec_in_dim, generator=_seeded(-i - 1)) for i in indices]
        return torch.stack(context), torch.stack(pooled)

    def weights(self, indices: Sequence[int], flipped: Sequence[bool]) -> None:
        return None

    def names(self, indices: Sequence[int]) -> list[str]:
        return [f"random {i}" for i in indices]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & 0xFFFF)


def fill(stages: Sequence[Stage], device: torch.device) -> None:
    """Random weights, made on ``device`` piece by piece: as an untrained model's, so that no step diverges."""
    generator = torch.Generator(device).manual_seed(0)
    for group in (g for stage in stages for g in stage.arena.groups):
        for piece in group.pieces:
            flat, numel = group.home["weight"][piece.start :], piece.parameter.numel()
            if piece.name.endswith((".bias", ".scale")):
                flat[:numel].fill_(1.0 if piece.name.endswith(".scale") else 0.0)
                continue
            small = "mod" in piece.name or piece.name.startswith(("final_layer.", "time_in.", "guidance_in."))
            std = 0.02 if small else math.sqrt(2.0 / sum(piece.parameter.shape))
            for start in range(0, numel, CHUNK):
                stop = min(start + CHUNK, numel)
                values = torch.empty(stop - start, dtype=group.dtype, device=device)
                flat[start:stop].copy_(values.normal_(std=std, generator=generator))


def random_run(
    preset: str,
    folder: Path,
    *,
    resolution: int,
    optimizer: OptimizerConfig,
    recipe: RecipeConfig,
    memory: MemoryConfig,
    text_tokens: int = TEXT_TOKENS,
    limits: machine.Machine | None = None,
    streams: Streams | None = None,
) -> Trainer:
    """An engine with random weights and data."""
    params = PRESETS[preset]
    info = preset_info(preset)
    config = RunConfig(name="step", model=ModelConfig(flux=preset), dataset=DatasetConfig(folder="-"),
                       optimizer=optimizer, recipe=recipe, memory=memory)  # fmt: skip
    data = RandomData(params, resolution, text_tokens, max(recipe.batch_size, 2))
    decided = plan.resolve(config, info, data.shapes, limits) if limits else None
    device = torch.device("cpu")

    def make(stages: Sequence[Stage]) -> None:
        fill(stages, device)

    if memory.device != "cpu" and torch.cuda.is_available():
        device = torch.device(decided.device if decided else "cuda")
    return Trainer(config, folder, dataset=data, plan=decided, streams=streams, info=info, fill=make)

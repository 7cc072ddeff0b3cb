"""What every tier of tests shares: a run directory of the tiny preset, made in milliseconds."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig
from trainer.data.cache import Cache
from trainer.flux.model import TINY, Flux, FluxParams, init_weights_
from trainer.weights import Entry, dtype_name, write_safetensors

TEXT_TOKENS = 6

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Begun in the background of a script, this process ignores Ctrl-C, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def write_flux(path: Path, params: FluxParams = TINY, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A Flux file with random weights."""
    model = init_weights_(Flux(params), seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias"):  # biases of zero would hide faults
                p.normal_(std=0.02, generator=torch.Generator().manual_seed(len(name)))
    entries = [
        Entry(n, dtype_name(dtype), tuple(p.shape), lambda p=p: iter([p.detach().to(dtype).flatten()]))
        for n, p in model.named_parameters()
    ]
    write_safetensors(path, entries, {})
    return path


def write_manifest(run_dir: Path, shapes: list[tuple[int, int]], params: FluxParams = TINY) -> dict[str, Any]:
    """A cache of random latents and captions inside ``run_dir``, and its manifest."""
    cache, g = Cache(run_dir / "cache"), torch.Generator().manual_seed(1)

    def caption(key: str) -> str:
        cache.write(
            "captions",
            key,
            torch.randn(TEXT_TOKENS, params.context_in_dim, generator=g),
            torch.randn(params.vec_in_dim, generator=g),
        )
        return key

    samples = []
    for i, (h, w) in enumerate(shapes):
        cache.write("latents", f"latent{i}", torch.randn(16, h, w, generator=g))
        samples.append(
            {"image": f"{i}.png", "latent": f"latent{i}", "shape": [h, w], "caption": caption(f"caption{i}")}
        )
    return {
        "format": 1,
        "cache": "cache",
        "samples": samples,
        "empty_caption": caption("empty"),
        "fingerprint": "f" * 64,
    }


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[RunConfig, Path, dict[str, Any]]]:
    """Make a run of the tiny preset: ``tiny(optimizer=..., recipe=..., memory=...)`` gives config, folder, manifest."""

    def make(
        *,
        name: str = "run",
        shapes: list[tuple[int, int]] | None = None,
        optimizer: dict | None = None,
        recipe: dict | None = None,
        memory: dict | None = None,
        params: FluxParams = TINY,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[RunConfig, Path, dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        flux = write_flux(folder / "flux.safetensors", params, dtype=dtype)
        config = RunConfig(
            name=name,
            model=ModelConfig(flux=str(flux)),
            dataset=DatasetConfig(folder=str(folder)),
            optimizer=OptimizerConfig(**{"lr": 1e-3, "weight_precision": "f32", **(optimizer or {})}),
            recipe=RecipeConfig(**{"batch_size": 3, **(recipe or {})}),
            memory=MemoryConfig(**{"device": "cpu", **(memory or {})}),
        )
        return config, folder, write_manifest(folder, shapes or [(8, 8)] * 5 + [(4, 12)] * 2, params)

    return make

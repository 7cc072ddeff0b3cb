"""What the engine costs beyond the arithmetic: its step beside a bare PyTorch loop, in one process, alternating.

The bare loop has the same model, batch and optimizer arithmetic, checkpoints each block, and does
nothing else: no run directory, no counted noise, no flat memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig
from trainer.data.cache import Cache
from trainer.flux.model import TINY, Flux, init_weights_, patchify, unpatchify
from trainer.loop import Trainer
from trainer.optim.base import make_storage, spec_from_config, update_chunk_
from trainer.weights import entry, write_safetensors

TEXT_TOKENS = 64


def make_run(folder: Path, batch: int, side: int) -> tuple[RunConfig, dict[str, Any]]:
    """A tiny Flux with random weights and ``batch`` random samples of ``side`` x ``side`` latent pixels."""
    model = init_weights_(Flux(TINY), 0)
    write_safetensors(folder / "flux.safetensors", [entry(n, p.detach()) for n, p in model.named_parameters()])
    cache, samples = Cache(folder / "cache"), []
    for i in range(batch):
        cache.write("latents", f"latent{i}", torch.randn(16, side, side))
        cache.write(
            "captions", f"caption{i}", torch.randn(TEXT_TOKENS, TINY.context_in_dim), torch.randn(TINY.vec_in_dim)
        )
        samples.append({"image": f"{i}.png", "latent": f"latent{i}", "shape": [side, side], "caption": f"caption{i}"})
    manifest = {"format": 1, "cache": "cache", "samples": samples, "empty_caption": "caption0", "fingerprint": ""}
    config = RunConfig(
        name="overhead",
        model=ModelConfig(flux=str(folder / "flux.safetensors")),
        dataset=DatasetConfig(folder="-"),
        optimizer=OptimizerConfig(weight_precision="f32"),
        recipe=RecipeConfig(batch_size=batch),
        memory=MemoryConfig(device="cpu"),
    )
    return config, manifest


def bare_step(config: RunConfig, trainer: Trainer) -> Callable[[], float]:
    """The step of a plain training script."""
    model = init_weights_(Flux(TINY), 0)
    spec = spec_from_config(config.optimizer, 0)
    parameters = list(model.parameters())
    storages = [make_storage(spec, p.numel(), p.dtype) for p in parameters]
    indices = list(range(config.recipe.batch_size))
    latents, (context, pooled) = trainer.data.latents(indices), trainer.data.captions(indices, [False] * len(indices))
    size, steps = latents.shape[-2:], 0

    def step() -> float:
        nonlocal steps
        steps += 1
        t = torch.sigmoid(torch.randn(len(latents)))
        noise = torch.randn_like(latents)
        x = torch.lerp(latents, noise, t.view(-1, 1, 1, 1))
        img, txt, vec = model.embed(patchify(x), context, t, pooled, torch.ones_like(t))
        pe = model.rope(size[0], size[1], context.shape[1], "cpu")
        for block in model.double_blocks:
            img, txt = cast(Any, checkpoint(block, img, txt, vec, pe, use_reentrant=False))
        stream = torch.cat((txt, img), 1)
        for block in model.single_blocks:
            stream = checkpoint(block, stream, vec, pe, use_reentrant=False)
        velocity = unpatchify(model.final_layer(stream[:, context.shape[1] :], vec), *size)  # type: ignore[index]
        loss = torch.nn.functional.mse_loss(velocity, noise - latents)
        loss.backward()
        for p, storage in zip(parameters, storages, strict=True):
            assert p.grad is not None
            update_chunk_(
                spec, p.data.view(-1), p.grad.view(-1), storage, lr=config.optimizer.lr, step=steps
            )
            p.grad = None
        return loss.item()

    return step


def measure(steps: int, rounds: int, batch: int, side: int) -> dict[str, float]:
    """Median seconds per step of both, of ``rounds`` rounds of ``steps`` steps each, taken in turn."""
    with tempfile.TemporaryDirectory() as folder:
        config, manifest = make_run(Path(folder), batch, side)
        trainer = Trainer(config, Path(folder), dataset=manifest)
        ways = {"engine": trainer.train_step, "bare": bare_step(config, trainer)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(rounds + 1):
            for name, step in ways.items():
                start = time.perf_counter()
                for _ in range(steps):
                    step()
                if round_:  # the first round warms up
                    seconds[name].append((time.perf_counter() - start) / steps)
    medians = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    return {**medians, "ratio": medians["engine_seconds"] / medians["bare_seconds"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the last line")
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--side", type=int, default=32, help="latent pixels (32: a 256 px picture)")
    args = parser.parse_args()
    result = measure(args.steps, args.rounds, args.batch, args.side)
    if not args.json:
        sys.stdout.write(
            f"engine {result['engine_seconds'] * 1e3:.1f} ms, bare loop {result['bare_seconds'] * 1e3:.1f} ms a step\n"
        )
    sys.stdout.write(json.dumps({**result, "preset": "tiny", "batch": args.batch, "side": args.side}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

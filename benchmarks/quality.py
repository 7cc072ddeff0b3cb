"""What the storage of weights and states costs in quality (``python -m benchmarks.quality --json``).

The tiny Flux, first trained on 12 of the demo's 16 drawings (once, in float32), is fine-tuned on all 16 with each
method. Weights are bf16 but for those that are always float32; the reference has float32 weights and states. Every
method computes forward and backward in float32 from its weights, so that only its optimizer and its storage differ,
and is judged by the loss at noise and noise levels that no training step used. Seeds are paired: the same seed means
the same batches, noise and levels for every method. Each method runs at the best of a grid of learning rates,
factors of 2 apart, that is widened until the best is inside it.

The last line is one JSON object: by method the rate, the losses, and the mean and spread of the paired difference to
the reference. Adafactor is pytorch_optimizer's, on a float32 copy that is rounded at random into the bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer import demo_data, flow
from trainer.config import RecipeConfig
from trainer.flux.model import LATENT_SCALE, LATENT_SHIFT, TINY, Flux, init_weights_, trainable_dtype
from trainer.optim import STATE_FORMATS, AdanOffload, NAdamOffload
from trainer.optim.rounding import BLOCK, WEIGHT_STREAM, noise_of, stochastic_

REFERENCE, ADAFACTOR, CANDIDATE = "reference", "adafactor+stochastic", "nadam log16+split"
PRECISIONS = ("split", "stochastic", "nearest")
RECIPE = RecipeConfig(timestep_sampling="sigmoid")
LEVELS = 8
"""Noise levels at which a model is judged."""
Step = Callable[[float], None]


def data() -> tuple[Tensor, Tensor, Tensor]:
    """The 16 drawings: model-space latents, caption tokens and pooled captions."""
    latents = demo_data.LinearVAE.fitted().encode(torch.from_numpy(demo_data.drawings()))
    latents = (latents - LATENT_SHIFT) * LATENT_SCALE
    return (latents.float(), *demo_data.CaptionEncoder.made().encode(list(demo_data.CAPTIONS)))


def losses(model: Flux, weights: dict[str, Tensor], which: list[int], levels: list[float], seed: tuple) -> Tensor:
    """Loss of each of the samples ``which`` with float32 ``weights``."""
    latents, context, pooled = (x[which] for x in DATA)
    noise = torch.stack([flow.noise_like(latents.shape[1:], *seed, i, place) for place, i in enumerate(which)])
    t = torch.tensor(levels)
    x, target = flow.noised(latents, noise, t)
    predicted = functional_call(model, weights, (x, t, context, pooled, torch.ones(len(which))))
    return flow.sample_losses(predicted, target, RECIPE)


def held_out(model: Flux, weights: dict[str, Tensor]) -> float:
    """Mean loss over all drawings at fixed noise and levels that training never sees."""
    with torch.no_grad():
        levels = flow.fixed_timesteps(LEVELS)
        rounds = [losses(model, weights, list(range(16)), [t] * 16, ("held out",)) for t in levels]
    return float(torch.stack(rounds).double().mean())


def fit(
    params: dict[str, nn.Parameter], step: Step, lr: float, steps: int, seed: int, pool: int = 16, batch: int = 8
) -> float:
    """Train ``params`` in place and return their held-out loss; cosine to zero after a short warm-up."""
    model = Flux(TINY)
    for n in range(1, steps + 1):
        generator = flow.generator("batch", seed, n)
        which = torch.randperm(pool, generator=generator)[:batch].tolist()
        levels = [flow.timestep(RECIPE, DATA[0].shape, seed, n, i) for i in which]
        weights = {name: p.float() for name, p in params.items()}
        losses(model, weights, which, levels, (seed, n)).mean().backward()
        warm = min(1.0, n / 20)
        step(lr * warm * 0.5 * (1 + math.cos(math.pi * n / steps)))
        for p in params.values():
            p.grad = None
    return held_out(model, {name: p.detach().float() for name, p in params.items()})


def start(pretraining: int) -> dict[str, Tensor]:
    """The model that is fine-tuned, in float32, its large matrices rounded to bf16."""
    model = init_weights_(Flux(TINY).requires_grad_(False), 0)
    params = {name: nn.Parameter(p.clone()) for name, p in model.named_parameters()}
    optimizer = NAdamOffload(params.values(), state_format="f32")
    fit(params, _stepper(optimizer), 2e-3, pretraining, seed=10**6, pool=12)
    return {name: p.detach().to(trainable_dtype(name, torch.bfloat16)).float() for name, p in params.items()}


def _stepper(optimizer: torch.optim.Optimizer) -> Step:
    def step(lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

    return step


@dataclass(frozen=True)
class Method:
    """One way of training; ``make`` gives the step for parameters made by ``parameters``."""

    name: str
    lr: float
    """Where its grid begins."""
    make: Callable[[dict[str, nn.Parameter], int], Step]
    base: torch.dtype = torch.bfloat16

    def parameters(self, weights: dict[str, Tensor]) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(w.to(trainable_dtype(name, self.base), copy=True)) for name, w in weights.items()}


def _ours(make: Any, **settings: Any) -> Callable[[dict[str, nn.Parameter], int], Step]:
    return lambda params, seed: _stepper(make(params.values(), seed=seed, **settings))


def _adamw(params: dict[str, nn.Parameter], seed: int) -> Step:
    return _stepper(torch.optim.AdamW(params.values(), weight_decay=0.0))


def _adafactor(params: dict[str, nn.Parameter], seed: int) -> Step:
    from pytorch_optimizer import AdaFactor

    shadows = {name: p.detach().float() for name, p in params.items()}
    fixed: dict[str, Any] = {"scale_parameter": False, "relative_step": False, "betas": (None, 0.999)}
    inner = _stepper(AdaFactor(shadows.values(), **fixed))
    count = 0

    def step(lr: float) -> None:
        nonlocal count
        count += 1
        for shadow, p in zip(shadows.values(), params.values(), strict=True):
            shadow.copy_(p.detach())
            assert p.grad is not None
            shadow.grad = p.grad.float()
        inner(lr)
        for key, (shadow, p) in enumerate(zip(shadows.values(), params.values(), strict=True)):
            if p.dtype == torch.float32:
                p.detach().copy_(shadow)
                continue
            flat = nn.functional.pad(shadow.view(-1), (0, -shadow.numel() % BLOCK)).view(-1, BLOCK)
            out = torch.empty_like(flat, dtype=torch.bfloat16)
            rows = range(key << 20, (key << 20) + len(flat))
            stochastic_(out, flat, noise_of(seed, count, [rows], flat.device), WEIGHT_STREAM)
            p.detach().copy_(out.view(-1)[: p.numel()].view(p.shape))

    return step


def methods() -> dict[str, Method]:
    """All of them by name, the reference first."""
    found = [Method(REFERENCE, 1e-3, _ours(NAdamOffload, state_format="f32"), torch.float32)]
    for precision in PRECISIONS:
        for kind in STATE_FORMATS:
            settings = {"state_format": kind, "weight_precision": precision}
            found.append(Method(f"nadam {kind}+{precision}", 1e-3, _ours(NAdamOffload, **settings)))
    found.append(Method("adan f32+split", 5e-3, _ours(AdanOffload, state_format="f32")))
    found.append(Method("adan log16+split", 5e-3, _ours(AdanOffload)))
    found.append(Method(ADAFACTOR, 1e-3, _adafactor))
    found.append(Method("adamw bf16", 1e-3, _adamw))
    return {method.name: method for method in found}


def train(job: tuple[str, float, int, int]) -> float:
    """The held-out loss of (method, rate, seed, steps)."""
    name, lr, seed, steps = job
    method = methods()[name]
    params = method.parameters(START)
    loss = fit(params, method.make(params, seed), lr, steps, seed)
    return loss if math.isfinite(loss) else 1e9


DATA: tuple[Tensor, Tensor, Tensor]
START: dict[str, Tensor]


def prepare(weights: dict[str, Tensor] | None) -> None:
    """Set up a process: one thread, the data, and the model to start from."""
    global DATA, START
    torch.set_num_threads(1)
    DATA = data()
    START = weights or {}


class Runner:
    """Runs jobs in processes and remembers their results, in a file too if one is given."""

    def __init__(self, jobs: int, weights: dict[str, Tensor], memory: Path | None) -> None:
        self.memory, self.known = memory, {}
        if memory is not None and memory.exists():
            for line in memory.read_text(encoding="utf-8").splitlines():
                *job, loss = json.loads(line)
                self.known[tuple(job)] = loss
        context = multiprocessing.get_context("spawn")
        self.pool = context.Pool(jobs, initializer=prepare, initargs=(weights,))

    def run(self, jobs: list[tuple[str, float, int, int]]) -> list[float]:
        missing = [job for job in dict.fromkeys(jobs) if job not in self.known]
        for job, loss in zip(missing, self.pool.imap(train, missing), strict=True):
            self.known[job] = loss
            if self.memory is not None:
                with self.memory.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([*job, loss]) + "\n")
            sys.stderr.write(f"{job[0]:24} lr {job[1]:.3g} seed {job[2]}: {loss:.5f}\n")
        return [self.known[job] for job in jobs]


def search(runner: Runner, chosen: list[Method], seeds: int, steps: int) -> dict[str, dict[int, float]]:
    """For each method the mean loss by power of 2 of the rate, widened until the least is inside."""
    grids: dict[str, dict[int, float]] = {method.name: {} for method in chosen}
    wanted = {method.name: {-1, 0, 1} for method in chosen}
    while any(wanted.values()):
        jobs = [
            (m.name, m.lr * 2.0**power, seed, steps)
            for m in chosen for power in sorted(wanted[m.name]) for seed in range(seeds)
        ]  # fmt: skip
        found = dict(zip(jobs, runner.run(jobs), strict=True))
        for m in chosen:
            grid = grids[m.name]
            for power in wanted[m.name]:
                grid[power] = statistics.fmean(found[m.name, m.lr * 2.0**power, s, steps] for s in range(seeds))
            best = min(grid, key=lambda p: grid[p])
            wanted[m.name] = {p for p in (best - 1, best + 1) if p not in grid and abs(p) <= 12}
    return grids


def compare(results: list[float], reference: list[float]) -> dict[str, Any]:
    """The paired difference of a method's losses to the reference's."""
    differences = [a - b for a, b in zip(results, reference, strict=True)]
    return {
        "losses": results,
        "loss": statistics.fmean(results),
        "difference": statistics.fmean(differences),
        "spread": statistics.stdev(differences) if len(differences) > 1 else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="few steps, seeds and methods: to try it, not to quote")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--memory", type=Path, help="file of results already there, added to: to go on after a break")
    arguments = parser.parse_args()
    quick = arguments.quick
    steps, seeds, searched, pretraining = (20, 2, 1, 20) if quick else (300, 5, 2, 600)
    prepare(None)
    weights = start(pretraining)
    names = [REFERENCE, CANDIDATE, ADAFACTOR, "adan log16+split", "adamw bf16"] if quick else list(methods())
    chosen = [methods()[name] for name in names]
    runner = Runner(arguments.jobs, weights, arguments.memory)
    grids = search(runner, chosen, searched, steps)
    rates = {m.name: m.lr * 2.0 ** min(grids[m.name], key=lambda p: grids[m.name][p]) for m in chosen}
    jobs = [(name, rates[name], seed, steps) for name in names for seed in range(seeds)]
    found = dict(zip(jobs, runner.run(jobs), strict=True))
    results = {name: [found[name, rates[name], seed, steps] for seed in range(seeds)] for name in names}
    table = {name: {"lr": rates[name], **compare(results[name], results[REFERENCE])} for name in names}
    for m in chosen:
        table[m.name]["grid"] = {f"{m.lr * 2.0**power:.6g}": loss for power, loss in sorted(grids[m.name].items())}
    out = sys.stdout.write
    out(f"before training: {held_out(Flux(TINY), weights):.5f}\n")
    out(f"{'method':26}{'rate':>10}{'loss':>10}{'difference':>13}{'spread':>11}\n")
    for name, row in table.items():
        out(f"{name:26}{row['lr']:10.2e}{row['loss']:10.5f}{row['difference']:13.2e}{row['spread']:11.1e}\n")
    share = abs(table[CANDIDATE]["difference"]) / abs(table[ADAFACTOR]["difference"] or math.inf)
    out(f"{CANDIDATE} differs from the reference by {share:.3f} of what {ADAFACTOR} does\n")
    if arguments.json:
        out(json.dumps({"steps": steps, "seeds": seeds, "share_of_adafactor": share, "methods": table}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

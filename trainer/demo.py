"""The whole loop on any computer: a tiny Flux learns 16 captioned drawings from nothing, in a few minutes on a CPU.

``python -m trainer demo --out DIR`` makes an ordinary run directory of DIR, with the demo's files in it; the same run
can be trained on by ``python -m trainer train DIR`` or opened on the canvas.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from . import demo_data, plot
from .config import MemoryConfig, RunConfig
from .progress import Bar, training_text
from .run import RunDirectory

if TYPE_CHECKING:
    import argparse

    import torch

    from .loop import Trainer

log = logging.getLogger(__name__)

FILES = "demo"
"""Folder of the demo's model, VAE, caption encoder and drawings in the run directory."""
SAMPLING_STEPS = 20
PREVIEW_SEED = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m trainer demo``."""
    parser.add_argument("--out", default="demo_run", metavar="DIR", help="run directory to make or go on with")
    parser.add_argument("--steps", type=int, default=demo_data.STEPS, metavar="N",
                        help=f"step to train until, counted from the run's beginning ({demo_data.STEPS})")  # fmt: skip
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="training seed of a new run (0)")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON only")


def main(args: argparse.Namespace) -> int:
    """``python -m trainer demo``. Raises ``ValueError`` for what the user can put right."""
    if args.steps < 1:
        raise ValueError(f"--steps is {args.steps}: give a whole number above 0")
    with one_thread():
        return _main(args)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have torch use one core meanwhile.

    On matrices this small a second one gains a third, and on a busy machine, or in a container that may use fewer
    cores than it sees, it costs many times more: the threads wait for each other at every operation.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _main(args: argparse.Namespace) -> int:
    started = time.monotonic()
    say = Bar(1).say
    run = open_or_create(Path(args.out), args.seed)
    before = sample_untrained(run)
    at = run.status()["resume_step"]
    if at >= args.steps:
        say(f"the run in {run.path} is at step {at} already: nothing to train until {args.steps}")
    elif code := train(run, args.steps):
        say(f"stopped and saved at step {run.status()['resume_step']}: the same command goes on from there")
        return code
    result = finish(run, before) | {"seconds": round(time.monotonic() - started, 1)}
    if not args.json:
        for name in ("loss_first", "loss_last", "accuracy", "checkpoint", "run_dir"):
            sys.stdout.write(f"{name}: {result[name]}\n")
    else:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


def open_or_create(path: Path, seed: int | None) -> RunDirectory:
    """The demo's run in ``path``, its files and its cache whole. Raises ``ValueError`` if another run is there."""
    root = Path(os.path.abspath(path))
    if root.exists() and not root.is_dir():
        raise ValueError(f"--out {root} is a file: give the path of a folder")
    known = (root / "config.json").exists()
    if known and not (root / FILES / "flux_demo.safetensors").is_file():
        raise ValueError(f"--out {root} holds a run that is not the demo's: give another folder")
    paths = demo_data.write_demo(root / FILES)
    fields = demo_data.settings(paths, seed or 0)
    config = RunConfig(name="flux-fft-demo", memory=MemoryConfig(device="cpu"), **fields)
    if known:
        run = RunDirectory(root)
        if seed is not None and run.config.recipe.training_seed != seed:
            raise ValueError(f"the run in {root} has the training seed {run.config.recipe.training_seed}, not {seed}:"
                             " give another folder")  # fmt: skip
        prepare(run.config, paths, root)  # a damaged entry of the cache is made anew
        return run
    return RunDirectory.create(root, config, prepare(config, paths, root))


def prepare(config: RunConfig, paths: dict[str, Path], root: Path) -> dict[str, Any]:
    """Scan and encode the drawings into the run's own cache; returns the manifest."""
    from .data import cache
    from .data.scan import scan_folder
    from .flux.model import LATENT_SCALE, LATENT_SHIFT
    from .flux.variants import fingerprint

    vae = demo_data.LinearVAE.load(paths["vae"])
    captions = demo_data.CaptionEncoder.load(paths["captions"])
    return cache.prepare(
        scan_folder(config.dataset),
        config.dataset,
        cache.Cache(root / "cache"),
        encode_images=lambda pixels: (vae.encode(pixels) - LATENT_SHIFT) * LATENT_SCALE,
        encode_captions=captions.encode,
        vae_id=fingerprint(paths["vae"]),
        text_id=fingerprint(paths["captions"]),
        token_length=captions.token_length,
        run_dir=root,
    )


def train(run: RunDirectory, until: int) -> int:
    """Train with the engine in this process, as ``python -m trainer train`` does; 0 if the target was reached."""
    from .cli.headless import SIGNALLED
    from .worker import Worker

    bar = Bar(until)

    def watch(event: dict[str, Any]) -> None:
        if event["type"] == "step":
            with run.log.changed:
                summary = run.log.history().summary()
            bar.update(event["step"], training_text(summary))
        elif event["type"] == "eval":
            bar.say(f"step {event['step']}: loss at fixed noise and timesteps {event['loss']:.4f}")

    worker = Worker(run, foreground=True, until=until, watch=watch)
    try:
        code = worker.serve()
    finally:
        bar.close()
    status = run.status()
    if status["state"] == "failed":
        raise ValueError(status["error"])
    return code or (0 if status["step"] >= until else SIGNALLED.get(worker.quitting, 1))


def finish(run: RunDirectory, before: list[Path]) -> dict[str, Any]:
    """Sample, plot and export the weights of the newest save point, and measure them."""
    from .export.write import ExportOptions, export

    with run.lock():
        trainer = open_trainer(run, at_save_point=True)
        step, loss = trainer.step, trainer.evaluate()
        latents = sample(trainer, run)
        pixels = decode(run, latents)
        after = keep(run, pixels, step)
        checkpoint = run.path / "checkpoints" / f"demo-step-{step:06d}.safetensors"
        run.note_export(export(run, checkpoint, ExportOptions(dtype="f32", overwrite=True), trainer=trainer))
    samples = [*before, *after]
    try:
        curve = plot.draw_losses(run.losses(), evals=run.evals(), title="Demo: loss of each step")
        plot.save_png(curve, run.path / "samples" / "loss.png")
    except ValueError as error:
        log.warning("%s", error)
    return {
        "run_dir": str(run.path),
        "steps": step,
        "loss_first": run.evals()[0][1],
        "loss_last": loss,
        "samples": [str(p) for p in samples],
        "accuracy": accuracy(pixels),
        "checkpoint": str(checkpoint),
    }


def sample_untrained(run: RunDirectory) -> list[Path]:
    """Pictures of the weights before the first step, made once."""
    paths = picture_paths(run, 0)
    if not all(p.exists() for p in paths):
        trainer = open_trainer(run, at_save_point=False)
        keep(run, decode(run, sample(trainer, run)), 0)
    return paths


def open_trainer(run: RunDirectory, *, at_save_point: bool) -> Trainer:
    """The engine with the run's weights as they were first, or as they are in its newest save point."""
    from .loop import Trainer

    trainer = Trainer(run.config, run.path, dataset=run.dataset, rollbacks=run.rollbacks)
    point = run.latest_save_point()
    if at_save_point:
        assert point is not None
        trainer.load(point.path)
    return trainer


def sample(trainer: Trainer, run: RunDirectory) -> torch.Tensor:
    """Latents [16, 16, 8, 8] in model space, sampled from noise by the 16 captions alone."""
    import torch

    from .flow import noise_like
    from .sample import euler

    encoder = demo_data.CaptionEncoder.load(run.config.model.t5)
    context, pooled = encoder.encode(demo_data.CAPTIONS)
    side = demo_data.SIZE // demo_data.BLOCK
    noise = torch.stack([noise_like((demo_data.CHANNELS, side, side), "demo", PREVIEW_SEED, i) for i in range(16)])
    return euler(trainer.predict, noise, context, pooled, steps=SAMPLING_STEPS, guidance=run.config.recipe.guidance)


def decode(run: RunDirectory, latents: torch.Tensor) -> np.ndarray:
    """Pixels [16, 64, 64, 3] in 0..1 of model-space latents."""
    from .flux.model import LATENT_SCALE, LATENT_SHIFT

    vae = demo_data.LinearVAE.load(run.config.model.vae)
    return vae.decode(latents / LATENT_SCALE + LATENT_SHIFT).numpy()


def accuracy(pixels: np.ndarray) -> float:
    """Share of the pictures [16, H, W, 3] whose nearest drawing (by squared distance) is that of their caption."""
    drawn = demo_data.drawings()
    distance = ((pixels[:, None] - drawn[None]) ** 2).mean(axis=(2, 3, 4))
    return float((distance.argmin(axis=1) == np.arange(len(drawn))).mean())


def picture_paths(run: RunDirectory, step: int) -> list[Path]:
    """Where the pictures of a step lie: the sheet first, then one per caption."""
    folder, stem = run.path / "samples", f"demo-step-{step:06d}"
    names = ["sheet", *(f"{i:02d}_{'_'.join(name)}" for i, name in enumerate(demo_data.NAMES))]
    return [folder / f"{stem}_{name}.png" for name in names]


def keep(run: RunDirectory, pixels: np.ndarray, step: int) -> list[Path]:
    """Write the pictures of a step and their sheet."""
    pictures = [Image.fromarray((p * 255).round().astype(np.uint8)) for p in pixels]
    sheet = plot.sheet(pictures, demo_data.CAPTIONS, title=f"step {step}")
    paths = picture_paths(run, step)
    new = not paths[0].exists()
    for image, path in zip([sheet, *pictures], paths, strict=True):
        plot.save_png(image, path)
    if new:
        for i, (caption, path) in enumerate(zip(demo_data.CAPTIONS, paths[1:], strict=True)):
            run.append("sample", step=step, file=f"samples/{path.name}", prompt=caption, index=i)
    return paths

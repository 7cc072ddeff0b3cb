"""A run with its engine in this process, between two steps: what tests of its rules share."""

import torch

from trainer.data.cache import Cache
from trainer.live.session import Session
from trainer.run import RunDirectory

SHAPES = [(8, 8)] * 6
PAIRS = {"shapes": SHAPES, "recipe": {"batch_size": 2}}
"""Three batches an epoch."""


def recipe(**values) -> dict:
    return {"shapes": SHAPES, "recipe": {"batch_size": 2, **values}}


def session(run: RunDirectory, told: list[dict] | None = None) -> Session:
    """The run with its engine, in training; what it tells is added to ``told``."""
    made = Session(run, watch=([] if told is None else told).append)
    made.begin()
    made.use(made.load())
    made.transition("training", target=100)
    return made


def poison(run: RunDirectory, *indices: int) -> list[str]:
    """Make cached latents NaN, as a broken VAE would; returns the pictures' names."""
    samples = [run.dataset["samples"][index] for index in indices]
    for sample in samples:
        Cache(run.path / "cache").write("latents", sample["latent"], torch.full((16, *sample["shape"]), float("nan")))
    return [sample["image"] for sample in samples]


def infinite_gradients(one: Session, *stages: str) -> None:
    """Have the next step's gradients of these stages not be finite."""
    for arena in (stage.arena for stage in one.trainer.stages if stage.name in stages):

        def infinite(g, add, arena=arena, take=arena.take_gradients):
            arena.take_gradients = take
            take([g[0] * float("inf"), *g[1:]], add=add)

        arena.take_gradients = infinite


def events(run: RunDirectory, *kinds: str) -> list[dict]:
    return [e for e in run.events() if e["type"] in kinds]


def masters(one: Session) -> dict[str, torch.Tensor]:
    return {f"{s.name}.{g.label}": g.current.clone() for s in one.trainer.stages for g in s.arena.groups}

"""What an engine holds, to be compared bit for bit."""

import torch

from trainer.loop import Trainer
from trainer.run import RunDirectory

SPLIT = {"optimizer": {"weight_precision": "split"}}
ADAN = {"kind": "adan", "betas": (0.98, 0.92, 0.99)}
KINDS = [
    {"weight_precision": "split"},
    {"weight_precision": "stochastic"},
    {"weight_precision": "nearest", "lr": 1e-2},
    {"weight_precision": "f32"},
    {"weight_precision": "split", "state_format": "f32"},
    {"weight_precision": "split", "state_format": "u16pow"},
    {**ADAN, "weight_precision": "split", "state_format": "int8"},
]
"""Optimizers of each way to keep weights and states."""


def contents(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all weights, residuals and states, by stage, group and name."""
    trainer.conveyor.streams.synchronize()
    return {
        f"{stage.name}.{group.label}.{name}": tensor.clone()
        for stage in trainer.stages
        for group in stage.arena.groups
        for name, tensor in {"weight": group.current, **group.storage}.items()
    }


def exact(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Its weights as they are exported in float32, by their names in the file."""
    return {e.name: torch.cat([c.float().flatten() for c in e.chunks()]).view(e.shape) for e in trainer.entries("f32")}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """What differs is named."""
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def engine(run: RunDirectory, **options) -> Trainer:
    return Trainer(run.config, run.path, dataset=run.dataset, **options)


def emptied(run: RunDirectory) -> Trainer:
    """An engine into which something is to be loaded: what is left in it would be seen."""
    trainer = engine(run, fill=lambda stages: None)
    for group in (g for stage in trainer.stages for g in stage.arena.groups):
        for tensor in (group.home["weight"], *group.storage.values()):
            tensor.view(-1).view(torch.uint8).fill_(7)
    return trainer

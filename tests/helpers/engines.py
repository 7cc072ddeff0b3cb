"""What an engine holds, for tests that compare two of them bit for bit."""

import torch

from trainer.loop import Trainer


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all weights and states, by stage, group and name."""
    trainer.conveyor.streams.synchronize()
    return {
        f"{stage.name}:{group.label}.{name}": t.clone()
        for stage in trainer.stages
        for group in stage.arena.groups
        for name, t in {"weight": group.current, **group.storage}.items()
    }

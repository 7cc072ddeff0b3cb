"""The weights that a run has kept at one of its steps, as others load them. No engine is made, nothing trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..run import RunDirectory
from .savepoints import Source

if TYPE_CHECKING:
    from torch import Tensor

    from ..weights import Entry


def kept_at(run: RunDirectory, step: int) -> Source:
    """The save point of ``step``, or the checkpoint of it. ``ValueError`` names the steps that there are."""
    kept = {source.step: source for source in (*run.checkpoints(), *run.save_points())}
    if step not in kept:
        have = ", ".join(str(one) for one in sorted(kept)) or "none"
        raise ValueError(f"run {run.name!r} has kept nothing of step {step}: it has {have}")
    return kept[step]


def weights(source: Source) -> dict[str, Tensor]:
    """All weights in bf16, by Black Forest Labs' names: as large as the model is."""
    import torch
    from safetensors.torch import load_file

    from .. import files
    from ..weights import TensorFile
    from .masters import saved_entries

    if source.path.is_file() and not files.WINDOWS:
        return load_file(source.path)
    if source.path.is_file():  # mapped, it could not be removed as long as the weights are in use
        with TensorFile(source.path) as file:
            return {name: file.load(name) for name in file.tensors}

    def whole(entry: Entry) -> Tensor:
        return torch.cat([part.flatten().to(torch.bfloat16) for part in entry.chunks()]).view(entry.shape)

    return {entry.name: whole(entry) for entry in saved_entries(source.path, "bf16")}

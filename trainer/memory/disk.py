"""What a run takes on its disk, and what is free there. All figures are bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import RunConfig
from .machine import GIB

if TYPE_CHECKING:
    from ..flux.variants import FileInfo
    from .footprint import Stages

KEPT_FOLDERS = ("state", "checkpoints")
"""Of a run directory: what lies there makes way for what comes."""


def needed(
    config: RunConfig, info: FileInfo, shapes: Sequence[tuple[int, int]], stages: Stages, text_tokens: int
) -> dict[str, int]:
    """Bytes by what takes them, at most: older save points and checkpoints go when the newest is whole."""
    assert info.flux is not None
    recipe, dataset, numel = config.recipe, config.dataset, 2 * stages.numel
    points = recipe.keep_save_points + 1
    found = {f"disk: {points} save points": points * stages.home, "disk: an export": numel}
    if recipe.checkpoint_every_steps:
        count = recipe.keep_checkpoints + 1 if recipe.keep_checkpoints else 1
        found[f"disk: {count} checkpoint{'s' if count > 1 else ', of each'}"] = count * numel
    varied = dataset.shuffle_tags or dataset.tag_dropout > 0
    caption = 2 * text_tokens * info.flux["context_in_dim"] * (dataset.caption_variants if varied else 1)
    found["disk: encoded pictures and captions"] = sum(4 * 16 * h * w + caption for h, w in shapes)
    return found


def room(folder: Path) -> int | None:
    """Bytes that the run in ``folder``, or a run to be made there, may fill; None where nobody can tell.

    What a run holds now is counted as free: its save points make way.
    """
    here = folder.absolute()
    try:
        found = next(p for p in (here, *here.parents) if p.exists())
        return shutil.disk_usage(found).free + sum(_sizes(here))
    except (OSError, StopIteration):
        return None


def _sizes(run: Path) -> Iterator[int]:
    for name in KEPT_FOLDERS:
        for folder, _, files in os.walk(run / name):
            yield from (os.path.getsize(os.path.join(folder, file)) for file in files)


def told(config: RunConfig, takes: dict[str, int], free: int | None) -> Iterator[str]:
    """What a user should know of it: one sentence each."""
    total, recipe = sum(takes.values()), config.recipe
    if free is not None and free < total:
        yield (
            f"the disk of the runs has room for {free / GIB:.1f} GiB and this one takes up to {total / GIB:.1f} GiB"
            " (save points, an export, what is encoded): free some space, or keep fewer save points and checkpoints"
        )
    if recipe.checkpoint_every_steps and not recipe.keep_checkpoints:
        each = next(size for name, size in takes.items() if "of each" in name)
        yield (
            f"a checkpoint of {each / GIB:.1f} GiB every {recipe.checkpoint_every_steps} steps, and all are kept: set"
            " keep_checkpoints where the disk is small"
        )

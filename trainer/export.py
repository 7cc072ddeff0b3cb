"""Checkpoints for others to load, and what they say about themselves: ModelSpec 1.0.0 and the recipe.

No path and no caption gets into the metadata. ModelSpec: https://github.com/Stability-AI/ModelSpec.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import RunConfig
from .settings import to_dict

if TYPE_CHECKING:
    from .loop import Trainer
    from .run import RunDirectory
    from .weights import Entry

DTYPES = ("bf16", "f16", "f32")
_ARCHITECTURES = {"dev": "flux-1-dev", "schnell": "flux-1-schnell"}


def check_target(path: Path, overwrite: bool) -> None:
    """Raise ``ValueError`` unless a checkpoint may be written to ``path``."""
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: choose another name, or allow it to be overwritten")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist: create it or choose another")


def export_checkpoint(trainer: Trainer, path: str | os.PathLike[str], dtype: str, *, overwrite: bool = False,
                      metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write the weights as they are to ``path``; ``metadata`` is added to what the recipe says, or takes its place.

    ``ValueError`` in one line where the file exists, the disk is full or the dtype is unknown; nothing is left then.
    """
    target = Path(os.path.abspath(path))
    check_target(target, overwrite)
    about = export_metadata(trainer.config, step=trainer.step, variant=trainer.info.variant,
                            samples=len(trainer.data.shapes), dtype=dtype)
    return _write(target, trainer.entries(dtype), about | dict(metadata or {}), trainer.step, dtype)


def export_save_point(run: RunDirectory, path: str | os.PathLike[str], dtype: str, *, overwrite: bool = False,
                      metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """``export_checkpoint`` of the newest save point, from its files: no engine is made. The run's lock is held."""
    from .checkpoint import saved_entries

    target = Path(os.path.abspath(path))
    check_target(target, overwrite)
    point = run.latest_save_point()
    if point is None:
        raise ValueError(f"run {run.name!r} has no save point: train it first")
    about = export_metadata(run.config, step=point.step, variant=run.flux(resumed=True).variant,
                            samples=len(run.dataset["samples"]), dtype=dtype)
    return _write(target, saved_entries(point.path, dtype), about | dict(metadata or {}), point.step, dtype)


def _write(target: Path, entries: list[Entry], about: dict[str, str], step: int, dtype: str) -> dict[str, Any]:
    from .weights import write_safetensors

    write_safetensors(target, entries, about)
    return {"path": str(target), "bytes": target.stat().st_size, "step": step, "dtype": dtype}


def export_metadata(config: RunConfig, *, step: int, variant: str, samples: int, dtype: str) -> dict[str, str]:
    """The metadata of a checkpoint of ``config``'s run after ``step`` updates, trained on ``samples`` pictures."""
    whole = to_dict(config)
    dataset = {name: whole["dataset"][name] for name in ("resolution", "bucket_step", "upscale")} | {"samples": samples}
    recipe = {"optimizer": whole["optimizer"], "recipe": whole["recipe"], "dataset": dataset}
    return {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": _ARCHITECTURES.get(variant, f"flux-1-{variant}"),
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": config.name,
        "modelspec.resolution": f"{config.dataset.resolution}x{config.dataset.resolution}",
        "modelspec.date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "flux_fft.steps": str(step),
        "flux_fft.dtype": dtype,
        "flux_fft.recipe": json.dumps(recipe, separators=(",", ":")),
    }

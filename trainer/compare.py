"""What sets two descriptions of a run apart, and what that means for going on with it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import DatasetConfig, RunConfig
from .settings import to_dict

MAY_CHANGE = "may change"
"""Taken with a message: nothing that was trained depends on it."""
ASK = "ask"
"""The user chooses: go on with the new setting, or begin another run."""
REFUSE = "refuse"
"""The weights of the run cannot be used under the new setting."""

_ASKED = ("optimizer.kind", "optimizer.state_format", "optimizer.weight_precision")
"""Settings on which the saved optimizer states and weights depend."""


@dataclass(frozen=True)
class Difference:
    """One setting that differs."""

    name: str
    """Dotted: ``optimizer.lr``."""
    old: Any
    new: Any
    grade: str
    """``MAY_CHANGE``, ``ASK`` or ``REFUSE``."""

    def __str__(self) -> str:
        return f"{self.name} was {_shown(self.name, self.old)} and is {_shown(self.name, self.new)}"


def _shown(name: str, value: Any) -> str:
    if name != "model.loras":
        return f"'{value}'" if isinstance(value, str) else repr(value)  # a backslash is one, as in a path of Windows
    return " + ".join(f"'{lora['path']}' at {lora['strength']:g}" for lora in value) or "none"


def compare(old: RunConfig, new: RunConfig, *, noted: str = "") -> list[Difference]:
    """The differences, in the order of the settings; ``name`` is no difference.

    Model files and folders that were moved or renamed are told by their content. Another Flux, or another set of LoRAs
    merged into it, asks, one of another architecture is refused; another encoder, VAE or dataset asks; another
    optimizer asks, its hyper-parameters may change, as may memory and recipe. ``noted``: the fingerprint of the old
    Flux, should its file be gone from where it was.
    """
    before, after = flat(old), flat(new)
    found = []
    for name, value in after.items():
        if name == "name" or before[name] == value:
            continue
        if _same(name, before[name], value) or (name == "model.flux" and _moved(before[name], value, noted)):
            continue
        found.append(Difference(name, before[name], value, _grade(name, before[name], value)))
    return found


def _grade(name: str, old: Any, new: Any) -> str:
    if name == "model.flux" and _other_architecture(old, new):
        return REFUSE
    asked = name.startswith(("model.", "dataset.")) or name in _ASKED
    return ASK if asked else MAY_CHANGE


def _same(name: str, old: Any, new: Any) -> bool:
    """Whether two settings that differ name the same files."""
    if name == "model.loras":
        old, new = ([lora for lora in loras if lora["strength"]] for loras in (old, new))
        return len(old) == len(new) and all(
            a["strength"] == b["strength"] and _same_place(a["path"], b["path"]) for a, b in zip(old, new, strict=True)
        )
    return name.startswith(("model.", "dataset.folder")) and _same_place(old, new, content=name.startswith("model."))


def _same_place(old: str, new: str, *, content: bool = True) -> bool:
    from .flux.variants import fingerprint

    if old == new:
        return True
    if not (os.path.exists(old) and os.path.exists(new)):
        return False
    try:
        return os.path.samefile(old, new) or (content and fingerprint(old) == fingerprint(new))
    except (OSError, ValueError):
        return False


def _moved(old: str, new: str, noted: str) -> bool:
    from .flux.variants import fingerprint

    try:
        return not os.path.exists(old) and fingerprint(new) == noted
    except (OSError, ValueError):
        return False


def _other_architecture(old: str, new: str) -> bool:
    from .flux.variants import inspect_file

    if not (os.path.exists(old) and os.path.exists(new)):
        return False
    return inspect_file(old).flux != inspect_file(new).flux


def flat(config: RunConfig) -> dict[str, Any]:
    """The settings by dotted name: ``{"optimizer.lr": 3.5e-6, ...}``."""
    found: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": leaf for inner, leaf in value.items()}
        else:
            found[name] = value
    return found


def relocate(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """The config with ``change(path)`` in place of each path; empty ones stay empty."""

    def moved(path: str) -> str:
        return change(path) if path else ""

    def pictures(dataset: DatasetConfig) -> DatasetConfig:
        return dataclasses.replace(
            dataset, folder=moved(dataset.folder), validation_folder=moved(dataset.validation_folder),
            also=tuple(map(pictures, dataset.also)))  # fmt: skip

    model = config.model
    files = {name: moved(getattr(model, name)) for name in ("flux", "clip_l", "t5", "vae")}
    loras = tuple(dataclasses.replace(lora, path=moved(lora.path)) for lora in model.loras)
    model = dataclasses.replace(model, **files, loras=loras)
    return dataclasses.replace(config, model=model, dataset=pictures(config.dataset))

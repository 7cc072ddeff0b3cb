"""The states of an optimizer, to a file and back without a bit changed.

Not through ``torch.optim.Optimizer.load_state_dict``, which casts states to their parameter's dtype: codes would
be rounded as if they were numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..weights import Entry, TensorFile, entry, write_safetensors
from .base import make_storage

if TYPE_CHECKING:
    from .offload import OffloadOptimizer

FORMAT = "flux_fft optimizer 1"
PathLike = str | os.PathLike[str]


def remembered(optimizer: OffloadOptimizer) -> dict[str, Any]:
    """What an optimizer knows beyond its states and settings."""
    return {
        "kind": type(optimizer).__name__,
        "seed": optimizer.seed,
        "skipped": int(optimizer.skipped),
        "stepped": [i for i, (p, _) in enumerate(optimizer.parameters()) if p in optimizer._stepped],
        "norm_sq": float(optimizer._norm_sq),
        "previous_norm_sq": None if optimizer._previous_norm_sq is None else float(optimizer._previous_norm_sq),
    }


def save(optimizer: OffloadOptimizer, path: PathLike) -> None:
    """See ``OffloadOptimizer.save``."""
    packed = optimizer.state_dict()
    entries: list[Entry] = []
    steps = {}
    for index, state in packed["state"].items():
        steps[index] = state["step"]
        entries += [entry(f"{index}.{name}", part) for name, part in state.items() if isinstance(part, Tensor)]
    rest = {"steps": steps, "param_groups": packed["param_groups"], "offload": packed["offload"]}
    write_safetensors(path, entries, {"format": FORMAT, "optimizer": json.dumps(rest, default=float)})


def load(optimizer: OffloadOptimizer, path: PathLike) -> None:
    """See ``OffloadOptimizer.load``."""
    with TensorFile(path) as file:
        metadata = file.header.metadata
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds no optimizer states of this version: give a file that save() wrote")
        rest = json.loads(metadata["optimizer"])
        names: dict[int, list[str]] = {int(index): [] for index in rest["steps"]}
        for name in file.tensors:
            index, part = name.split(".", 1)
            names[int(index)].append(part)
        found = {
            index: {part: (file.dtype(f"{index}.{part}"), file.tensors[f"{index}.{part}"].shape) for part in parts}
            for index, parts in names.items()
        }
        steps = {int(index): step for index, step in rest["steps"].items()}

        def fill(index: int, part: str, out: Tensor) -> None:
            file.read_into_(f"{index}.{part}", out)

        _restore(optimizer, str(path), rest["param_groups"], rest["offload"], steps, found, fill)


def load_state_dict(optimizer: OffloadOptimizer, packed: Mapping[str, Any]) -> None:
    """See ``OffloadOptimizer.load_state_dict``."""
    if "offload" not in packed:
        raise ValueError("this state_dict is not one of ours: give what state_dict() of the same optimizer gave")
    states = packed["state"]
    steps = {index: state["step"] for index, state in states.items()}
    found = {
        index: {name: (part.dtype, tuple(part.shape)) for name, part in state.items() if isinstance(part, Tensor)}
        for index, state in states.items()
    }

    def fill(index: int, part: str, out: Tensor) -> None:
        out.copy_(states[index][part])

    _restore(optimizer, "the state_dict", packed["param_groups"], packed["offload"], steps, found, fill)


def _restore(
    optimizer: OffloadOptimizer, source: str, groups: list[dict[str, Any]], offload: dict[str, Any],
    steps: dict[int, int], found: dict[int, dict[str, tuple[torch.dtype, tuple[int, ...]]]],
    fill: Callable[[int, str, Tensor], None],
) -> None:  # fmt: skip
    if offload["kind"] != type(optimizer).__name__:
        raise ValueError(f"{source} was written by {offload['kind']}, not {type(optimizer).__name__}: use that one")
    own = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in groups] != own:
        raise ValueError(f"{source} was written for other parameter groups: build the optimizer as it was then")
    settings = [{k: _plain(v) for k, v in saved.items() if k != "params"} for saved in groups]
    parameters = [(p, g) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    fresh: dict[int, dict[str, Any]] = {}
    for index, parts in found.items():
        p, g = parameters[index]
        spec = optimizer.spec_of({**optimizer.param_groups[g], **settings[g]})
        storage = make_storage(spec, p.numel(), p.dtype, "cpu" if optimizer.offload else p.device)
        needed = {name: (part.dtype, tuple(part.shape)) for name, part in storage.items()}
        if needed != parts:
            what = f"parameter {index} of shape {list(p.shape)}"
            raise ValueError(f"{source} keeps {what} otherwise: use the model and the settings that it was saved with")
        fresh[index] = {"step": steps[index], **storage}
    # Nothing of the optimizer has been touched so far: what is wrong has been found by now.
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        group.update(saved)
    optimizer.state.clear()
    for index, state in fresh.items():
        optimizer.adopt(parameters[index][0], state)
        for name in found[index]:
            fill(index, name, state[name])
    optimizer.seed = offload["seed"]
    optimizer._specs.clear()
    optimizer.skipped.fill_(offload["skipped"])
    optimizer._stepped = {parameters[index][0] for index in offload["stepped"]}
    optimizer._norm_sq.fill_(offload["norm_sq"])
    previous = offload["previous_norm_sq"]
    optimizer._previous_norm_sq = None if previous is None else torch.full_like(optimizer._norm_sq, previous)


def _plain(value: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(value) if isinstance(value, list) else value


def settle(optimizer: OffloadOptimizer) -> None:
    """Wait for copies from the GPU that are under way."""
    for device in {p.device for p, _ in optimizer.parameters() if p.device.type == "cuda"}:
        torch.cuda.synchronize(device)

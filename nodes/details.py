"""What the sidebar shows of one run besides its curve: settings, save points, log, graph, small pictures."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
from pathlib import Path
from typing import Any

from ..trainer.files import read_json
from ..trainer.run import RunDirectory
from ..trainer.settings import to_dict
from .follow import folder_of, samples
from .words import lines

GRAPH = "graph.json"
"""The graph that trained the run last, kept by Train Steps: ``prompt`` (API format), ``workflow`` (or null)."""
LOG_BYTES = 64 * 1024
SIDES = (128, 256, 512, 1024)
"""Longest sides in pixels that small pictures are made in."""
_PREVIEW_INPUTS = {"width": "width", "height": "height", "sampler_name": "sampler", "scheduler": "scheduler",
                   "sampling_steps": "sampling_steps", "guidance": "guidance", "cfg": "cfg",
                   "preview_seed": "preview_seed"}
"""Inputs of Preview Settings, and what a picture's sidecar calls them."""


def details(run: RunDirectory) -> dict[str, Any]:
    """``settings`` (of ``config.json``), ``save_points``, ``checkpoints``, ``exports``, ``bytes`` on the disk,
    ``pictures``, ``previews`` (inputs for a Preview Settings node), ``graph`` and ``log`` (whether there are some)."""
    return {
        "run": run.name,
        "uid": run.uid,
        "settings": to_dict(run.config),
        "pictures": len({sample["image"] for sample in run.dataset["samples"]}),
        "save_points": [{"step": p.step, "bytes": _bytes(p.path), "time": p.path.stat().st_mtime}
                        for p in reversed(run.save_points())],
        "checkpoints": [{"file": p.name, "bytes": p.stat().st_size, "time": p.stat().st_mtime}
                        for p in sorted((run.path / "checkpoints").glob("*.safetensors"), reverse=True)],
        "exports": [{**{k: e.get(k) for k in ("file", "dtype", "step", "t")}, "folder": folder_of(run, e)}
                    for e in run.events_of("exported")],
        "bytes": _bytes(run.path),
        "previews": previews(run),
        "graph": (run.path / GRAPH).is_file(),
        "log": run.log_file.is_file(),
    }


def stored_graph(run: RunDirectory) -> dict[str, Any]:
    """``prompt`` and ``workflow`` of the graph that trained the run last. ``ValueError`` where none was kept."""
    if not (run.path / GRAPH).is_file():
        raise ValueError(f"run {run.name!r} keeps no graph, it was not trained from one: open its workflow")
    graph = read_json(run.path / GRAPH)
    if not isinstance(graph.get("prompt"), dict):
        raise ValueError(f"{run.path / GRAPH} is damaged: open the run's workflow")
    return {"prompt": graph["prompt"], "workflow": graph.get("workflow")}


def previews(run: RunDirectory) -> dict[str, Any]:
    """Settings for one more picture: as the run's graph has them, else as its newest picture, else by its model."""
    given = _preview_inputs(run)
    found = {k: given[k] for k in _PREVIEW_INPUTS if k in given and not isinstance(given[k], list)}
    if not found:
        newest = samples(run.path)[-1:]
        found = {k: one[kept] for one in newest for k, kept in _PREVIEW_INPUTS.items() if kept in one}
    return {**_usual(run), **found}


def _preview_inputs(run: RunDirectory) -> dict[str, Any]:
    """The inputs of the first Preview Settings of the run's graph."""
    with contextlib.suppress(ValueError, AttributeError):
        for node in stored_graph(run)["prompt"].values():
            if node.get("class_type") == "FluxFFTPreviewSettings":
                return dict(node.get("inputs", {}))
    return {}


def first_prompt(run: RunDirectory) -> str:
    """The first prompt of the run's previews: as its graph has it, else of its newest pictures. Empty: none."""
    given = _preview_inputs(run).get("prompts")
    if isinstance(given, str) and lines(given):
        return lines(given)[0]
    kept = samples(run.path)
    newest = [one.get("prompt") for one in kept if one.get("step") == kept[-1].get("step")]
    return next((prompt for prompt in newest if isinstance(prompt, str)), "")


def _usual(run: RunDirectory) -> dict[str, Any]:
    side, steps = run.config.dataset.resolution // 16 * 16, 20
    with contextlib.suppress(ValueError):  # its file may be gone, and nothing of it be noted
        flux = run.flux(resumed=True).flux
        steps = 20 if flux is None or flux.get("guidance_embed", True) else 4
    return {"width": side, "height": side, "sampler_name": "euler", "scheduler": "simple", "sampling_steps": steps,
            "guidance": 3.5, "cfg": 1.0, "preview_seed": 0}


def log_tail(run: RunDirectory) -> dict[str, Any]:
    """``text``: the last words of the run's workers, tracebacks included."""
    try:
        with open(run.log_file, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            data = file.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"run {run.name!r} has no log yet") from None
    if size > LOG_BYTES:
        data = data.partition(b"\n")[2]
    return {"text": data.decode("utf-8", "replace")}


def small_picture(path: Path, side: int) -> bytes:
    """A JPEG of the picture, at most about ``side`` pixels (one of ``SIDES``) wide and high."""
    return _small_picture(path, path.stat().st_mtime_ns, next((s for s in SIDES if s >= side), SIDES[-1]))


@functools.lru_cache(maxsize=512)
def _small_picture(path: Path, _: int, side: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    try:
        with Image.open(path) as picture:
            picture.draft("RGB", (side, side))
            small = picture.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path.name} is no picture that can be read: {error}") from None
    small.thumbnail((side, side))
    small.save(out, "JPEG", quality=88)
    return out.getvalue()


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while it is counted
            total += path.stat().st_size if path.is_file() else 0
    return total


def load_json(text: str) -> dict[str, Any]:
    """The JSON object that a request brought. ``ValueError`` for what is none."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise ValueError("the request holds no JSON object")
    return data

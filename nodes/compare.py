"""One grid of pictures: the same prompts and noise over the model a run began with, what it kept, and the run itself.

Pictures that the run has kept (previews with the same settings) are shown as they are. What must be sampled is: of the
run by its worker, without a copy of the weights; of its parent, its save points and its checkpoints by ComfyUI's own
Flux, one after the other, while the worker has given its VRAM back. The worker would need a second set of weights
beside its own (24 GB of RAM) for that; ComfyUI has its own ways to place a model where there is little memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from ..trainer.files import PART, replace
from . import bridge, bridge_model, grid, handles, pictures, registry, words

if TYPE_CHECKING:
    from ..trainer.run import RunDirectory

MOST = 12
"""Kept steps that ``all`` shows, evenly spread."""


class FluxFFTCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTCompare",
            display_name="Compare Steps",
            category=handles.CATEGORY,
            description="One labelled picture of how the run came along: a row for each prompt, a column for the "
                        "model it began with, for what it has kept on the way, and for the run as it is, all from "
                        "the same noise.",
            inputs=[
                handles.Run.Input("run", tooltip="The run, from Train Steps, Start or Open a Run."),
                handles.Previews.Input("previews", tooltip="What to sample, from Preview Settings. Pictures that were "
                                                           "made with the same settings while training are used."),
                io.String.Input("steps", default="all",
                                tooltip="Which steps on the way get a column: all (those with kept pictures, save "
                                        f"points or checkpoints, {MOST} at most), some, such as 250, 500, or nothing "
                                        "for none. Those without kept pictures are loaded and sampled, which takes "
                                        "as long as loading a checkpoint."),
                io.Boolean.Input("parent", default=True,
                                 tooltip="A column for the model that the run began with. Turn it off to save the "
                                         "time of loading that."),
                io.Boolean.Input("average", default=False,
                                 tooltip="A column for the running average of the weights. The recipe's ema_decay "
                                         "must have been above 0 while training."),
                io.Int.Input("cell_side", default=512, min=0, max=8192,
                             tooltip="Longer side of each picture in the grid, in pixels; 0: as they are. Lower it "
                                     "when the grid gets too large."),
            ],
            outputs=[handles.Run.Output("run_out", display_name="run"),
                     io.Image.Output("image", display_name="image")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, run, previews, steps, parent, average, cell_side) -> io.NodeOutput:
        handles.whole("cell_side", cell_side, 0, 8192)
        directory = registry.open_directory(run)
        bar = bridge.Progress(1, cls.hidden.unique_id)
        previews = dataclasses.replace(previews, average=False)  # each column says what it is of
        with pictures.Sampler(directory, previews, saved=run.saved) as sampler:
            columns = _columns(sampler, run, steps, parent, average)
            _check(sampler, run, columns)
            found: list[list[Path]] = []
            for i, (_, step, kind) in enumerate(columns):
                bar.update(i, len(columns))
                found.append(_pictures(sampler, run, step, kind))
        bar.update(1, 1)
        labels = [label for label, _, _ in columns]
        path = _keep(directory, grid.draw(labels, previews.prompts, found, cell_side), labels, found)
        text = f"{words.count(len(columns), 'column')}: {', '.join(labels)}"
        return io.NodeOutput(run, pictures.as_images([path]), ui={"text": (text,), "images": [bridge.ui_image(path)]})


def _columns(sampler: pictures.Sampler, run: handles.RunHandle, steps: str, parent: bool, average: bool,
             ) -> list[tuple[str, int, str]]:
    """Label, step and kind (``kept``, ``average`` or empty: the run itself) of each column, in the order of the grid.

    ``ValueError`` where ``steps`` names one that the run has nothing of.
    """
    kept = {source.step for source in (*sampler.run.checkpoints(), *sampler.run.save_points())}
    shown = sorted(step for step in kept | sampler.steps() if 0 < step < run.step)
    if steps.strip().lower() == "all":
        wanted = [shown[round(i * (len(shown) - 1) / (MOST - 1))] for i in range(MOST)] if len(shown) > MOST else shown
    else:
        wanted = sorted(set(map(_step, steps.replace(",", " ").split())))
        lacking = [step for step in wanted if step not in shown and step != run.step]
        if lacking:
            have = ", ".join(map(str, shown)) or "none"
            raise ValueError(f"steps has {lacking[0]}: run {run.name!r} has no pictures with these settings, no save "
                             f"point and no checkpoint of that step before {run.step}; it has {have}")
    columns = [("parent", 0, "kept")] if parent and run.step else []
    columns += [(f"step {step}", step, "kept") for step in wanted if step != run.step]
    columns.append((f"step {run.step}", run.step, "kept" if run.saved else ""))
    return columns + ([(f"average, step {run.step}", run.step, "average")] if average else [])


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text)):
        raise ValueError(f"steps has {text!r}: give all, nothing, or steps such as 250, 500")
    return int(text)


def _check(sampler: pictures.Sampler, run: handles.RunHandle, columns: Sequence[tuple[str, int, str]]) -> None:
    """Raise ``ValueError``, before minutes are spent on others, where a column cannot be had."""
    recipe = sampler.run.config.recipe
    for _, step, kind in columns:
        if sampler.recorded(step, kind == "average") is not None:
            continue
        if kind == "average" and run.saved:
            raise ValueError("average: it can only be sampled of the run as it is; connect Train Steps, or Open a Run "
                             "at its latest step")
        if kind == "average" and not recipe.ema_decay:
            raise ValueError("average: this run keeps no average of its weights; set ema_decay in its recipe before "
                             "training, or turn average off")
        if kind != "kept":
            registry.require_step(sampler.run, step, "no pictures with these settings were kept at that step")
        elif step == 0 and not Path(sampler.run.config.model.flux).is_file():
            raise ValueError(f"parent: {sampler.run.config.model.flux} is no file that ComfyUI can load; put it back, "
                             "or turn parent off")


def _pictures(sampler: pictures.Sampler, run: handles.RunHandle, step: int, kind: str) -> list[Path]:
    """The pictures of one column, sampled if they are not there."""
    found = sampler.recorded(step, kind == "average")
    if found is not None:
        return found
    if kind != "kept":
        return sampler.take(step, average=kind == "average", tell=not kind)
    sampler.encode_prompts()
    registry.park(sampler.run)  # ComfyUI needs the VRAM now
    saved = handles.RunHandle(name=run.name, uid=run.uid, step=step, saved=True)
    model = pictures.proxy(saved, sampler.run) if step else _parent(sampler.run)
    try:
        return sampler.take(step, model, tell=False)
    finally:
        del model
        bridge.let_go()


def _parent(run: RunDirectory) -> Any:
    """The Flux that the run began with, its merged LoRAs included, as ComfyUI's MODEL."""
    model = run.config.model
    return bridge_model.load_file(model.flux, [(lora.path, lora.strength) for lora in model.loras])


def _keep(run: RunDirectory, image: Any, labels: Sequence[str], found: Sequence[Sequence[Path]]) -> Path:
    """The grid as a file in the run's ``samples/compare/``."""
    told = repr((list(labels), [[p.name for p in column] for column in found], image.size))
    path = run.path / "samples" / "compare" / f"{hashlib.sha256(told.encode()).hexdigest()[:12]}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{PART}{path.name}")
    image.save(part, format="PNG")
    replace(part, path)
    return path

"""What Start does: scan, encode what is new, plan, and make the run directory or attach to the one there is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..trainer.compare import MAY_CHANGE, REFUSE, Difference
from ..trainer.config import RunConfig
from ..trainer.data import cache, scan
from ..trainer.data.captions import OWN
from ..trainer.data.encode import fill
from ..trainer.data.grouped import grouped
from ..trainer.data.manifest import changes
from ..trainer.data.pace import Pace
from ..trainer.data.report import SOURCES, ScanReport, rows
from ..trainer.files import write_json
from ..trainer.flux.variants import require_flux
from ..trainer.memory import plan as planning
from ..trainer.run import RunDirectory
from . import bridge, registry, scans, words
from .encoders import Encoders
from .handles import ModelHandle, RunHandle

STOP, CONTINUE, NEXT_NAME = "stop and ask", "continue the run", "use the next free name"
FRESH = "continue with fresh moments"
CHOICES = (STOP, CONTINUE, NEXT_NAME, FRESH)
KEPT = ("model.flux", "model.loras", "optimizer.kind", "optimizer.state_format", "optimizer.weight_precision")
"""What the weights and states of a run depend on: CONTINUE keeps these as they are in the run. FRESH keeps the weights
and takes the optimizer, whose moments begin at zero."""
MOST_WARNINGS = 5
"""Of what is not usable and of warnings, so many things each are told, each with the number of files."""
TELL_SECONDS = 2.0
"""Between two lines about how fast the encoding goes."""


@dataclass
class Started:
    """The run that a graph describes, and what the user is told."""

    handle: RunHandle
    lines: list[str] = field(default_factory=list)


def start(config: RunConfig, model: ModelHandle, if_different: str, node_id: str | None) -> Started:
    """Find or make the run. Raises ``ValueError`` in one line for all that the user can put right."""
    assert if_different in CHOICES
    require_flux(config.model.flux)
    # First, so that a wrong folder is told as one and not as another dataset of the run.
    report = scan.scan_folder(config.dataset, progress=_bar(node_id), look=scans.look)
    existing, config, notes, fresh = choose(config, if_different)
    model = dataclasses.replace(model, config=config.model)
    bridge.unload_models()  # what they hold is free for the training
    # Before anything is encoded: that can take an hour, in vain where the plan is impossible.
    shapes = [(height // 8, width // 8) for width, height in (sample.bucket for sample in report.samples)]
    plan = planning.resolve(config, require_flux(config.model.flux), shapes, folder=bridge.run_dir(config.name))
    # The memory that this run's own worker holds now is no longer free, but its own.
    if not plan.fits and not (existing is not None and existing.worker_alive()):
        raise ValueError("this training does not fit this machine: " + "; ".join(plan.reasons))
    manifest, told = encode(report, config, model, node_id)
    fits = f"Plan: {plan.ram_gb:.1f} GiB of RAM" + (f", {plan.vram_gb:.1f} GiB of VRAM" if plan.vram_gb else "")
    fits += f" on {plan.device}"
    if existing is None:
        run = RunDirectory.create(bridge.run_dir(config.name), config, manifest)
        state = f"Run {run.name!r} is new"
    else:
        run = existing
        notes += pictures_changed(run, manifest)
        if fresh:
            notes.append(f"the optimizer's moments begin anew at step {registry.renew_moments(run)}")
        run.update(config, manifest)
        state = f"Run {run.name!r} goes on from step {run.status()['resume_step']}"
    registry.remember_model(run.uid, model)
    registry.note_identity(run.path)
    lines = [f"{state}, in {run.path}", *(f"Taken: {note}" for note in notes), *told, fits, *plan.reasons]
    return Started(RunHandle(name=run.name, uid=run.uid, step=0), lines)


def choose(config: RunConfig, if_different: str) -> tuple[RunDirectory | None, RunConfig, list[str], bool]:
    """The run to attach to (None: make one), the config to use, the changes taken, and whether moments begin anew."""
    for name in names(config.name):
        path = bridge.run_dir(name)
        wanted = dataclasses.replace(config, name=name)
        if not (path / "config.json").exists():
            return None, wanted, [], False
        run = RunDirectory(path)
        differences = run.differences(wanted)
        serious = [d for d in differences if d.grade != MAY_CHANGE]
        if not serious:
            return run, wanted, [str(d) for d in differences], False
        if if_different in (CONTINUE, FRESH) and all(d.grade != REFUSE for d in serious):
            fresh = if_different == FRESH
            wanted = keep(run.config, wanted, serious, optimizer=not fresh)
            return run, wanted, [str(d) for d in run.differences(wanted)], fresh
        if if_different != NEXT_NAME:
            raise ValueError(refusal(name, serious))
    raise AssertionError("names never end")


def names(name: str) -> Iterator[str]:
    """``name``, ``name_2``, ``name_3`` ..."""
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1


def keep(old: RunConfig, new: RunConfig, differences: list[Difference], *, optimizer: bool = True) -> RunConfig:
    """``new`` with the run's own Flux and LoRAs, and its own ``optimizer`` if that is of another kind or format."""
    kept = {d.name for d in differences} & set(KEPT)
    for name in ("flux", "loras"):
        if f"model.{name}" in kept:
            model = dataclasses.replace(new.model, **{name: getattr(old.model, name)})
            new = dataclasses.replace(new, model=model)
    if optimizer and any(name.startswith("optimizer.") for name in kept):
        new = dataclasses.replace(new, optimizer=old.optimizer)
    return new


def refusal(name: str, differences: list[Difference]) -> str:
    """The line for a run that exists with another model, dataset or optimizer."""
    what = "; ".join(str(d) for d in differences)
    choices = f"set if_different to '{NEXT_NAME}'"
    if all(d.grade != REFUSE for d in differences):
        choices += f", '{CONTINUE}' or '{FRESH}'"
    return f"run_name {name!r} exists and is another run ({what}): choose another run_name, or {choices}"


def pictures_changed(run: RunDirectory, manifest: dict[str, Any]) -> list[str]:
    """A line if the run was trained on others than those of ``manifest``, which replaces one that is damaged."""
    try:
        what = changes(run.dataset, manifest)
        return [f"the pictures changed: {what}"] if what else []
    except (ValueError, LookupError, TypeError) as error:
        write_json(run.path / "dataset.json", manifest)
        return [f"the list of its pictures is made anew ({error})"]


def encode(report: ScanReport, config: RunConfig, model: ModelHandle,
           node_id: str | None) -> tuple[dict[str, Any], list[str]]:
    """The manifest of the dataset, with what was not cached encoded; and lines about the pictures."""
    with Encoders(model) as encoders:
        cut = encoders.cut_off((s.relative, s.captions) for s in report.pictures())
        scan.note("warning", cut)
        todo = cache.look(report, encoders.cache, vae_id=encoders.vae_id, text_id=encoders.text_id,
                          token_length=encoders.token_length, caption_bytes=encoders.caption_bytes,
                          run_dir=bridge.run_dir(config.name))
        lines = [*about(report, config.recipe.batch_size, cut), todo.require_space()]
        bridge.tell(node_id, lines)
        fill(todo, encoders.encode_images, encoders.encode_captions, _bar(node_id, lines))
    return todo.manifest, lines


def about(report: ScanReport, batch_size: int, cut: list[tuple[str, str]]) -> list[str]:
    """What will be trained on. ``cut``: pictures whose captions are too long, and what that does."""
    pictures = len({s.relative for s in report.samples})
    lines = [f"{words.count(pictures, 'picture')}, {words.count(len(report.buckets()), 'size')}",
             *rows(report, batch_size)]
    if report.uncaptioned:
        means = ", ".join(SOURCES[s] for s in report.sources() if s not in OWN)
        lines.append(f"Without a caption: {words.count(report.uncaptioned, 'picture')}, trained with {means}")
    skipped, warnings = grouped(report.skipped), grouped([*cut, *report.warnings])
    lines += [f"Not usable: {line}" for line in skipped[:MOST_WARNINGS]] + warnings[:MOST_WARNINGS]
    more = len(skipped[MOST_WARNINGS:]) + len(warnings[MOST_WARNINGS:])
    if more:
        lines.append(f"{words.count(more, 'more warning')}: python -m trainer scan lists them")
    return lines


def _bar(node_id: str | None, lines: Sequence[str] = ()) -> Callable[..., None]:
    """Shows how far something is; with ``lines``, that are told already, also how fast."""
    bar, pace, last = bridge.Progress(1, node_id), Pace(), 0.0

    def progress(*told: Any) -> None:  # (done, total), or what is done before them
        nonlocal last
        bridge.throw_if_cancelled()
        bar.update(*told[-2:])
        if lines and time.monotonic() > last + TELL_SECONDS:
            last = time.monotonic()
            bridge.tell(node_id, [*lines, pace.text(*told)])

    return progress

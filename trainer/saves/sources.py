"""What a run goes on from when it is opened, and how it is taken back to an earlier step.

That is its newest whole save point, unless ``run.json`` names something else at that step or a later one, under
``resume``: a weights-only checkpoint, or a save point of which only the weights are wanted. Whoever changes it holds
the run's lock.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..files import Damaged
from . import savepoints
from .savepoints import Source

if TYPE_CHECKING:
    from ..run import RunDirectory

log = logging.getLogger(__name__)


def sources(run: RunDirectory) -> list[Source]:
    """All that the run could go on from, in the order of their steps: the last is what it does go on from."""
    points = run.save_points()
    noted = run.facts().get("resume")
    if noted is None:
        return points
    if noted["checkpoint"] is not None:
        path = run.path / "checkpoints" / noted["checkpoint"]
        named = [Source(noted["step"], path, fresh=True)] if path.is_file() else []
    else:
        named = [dataclasses.replace(p, fresh=True) for p in points if p.step == noted["step"]]
    return sorted([*points, *named], key=lambda s: s.step)  # of two at one step the one that is named stays behind


def resume(run: RunDirectory, load: Callable[[Source], object]) -> Source | None:
    """Have ``load`` take up what the run goes on from, and return that; None where that is the model's file.

    What turns out to be damaged is set aside, with a warning and an event, and the one before is taken. ``ValueError``
    where there is none.
    """
    left = sources(run)
    for source, error in _lost(run, newest=left[-1].step if left else -1):
        _require_another(run, left, error)
        _set_aside(run, source, error)
    while left:
        source = left.pop()
        try:
            load(source)
            return source
        except Damaged as error:
            left = [other for other in left if other.path != source.path]  # it may be there twice: whole, and fresh
            _require_another(run, left, str(error))
            _set_aside(run, source, str(error))
            run.append("resumed", durable=True, step=left[-1].step)
    return None


def _lost(run: RunDirectory, newest: int) -> list[tuple[Source, str]]:
    """What was saved after the step ``newest`` and is plainly damaged, or gone, and how that is told."""
    found = [(Source(step, path), "; ".join(savepoints.missing(path)))
             for step, path in savepoints.damaged(*run.saved_in) if step > newest]
    noted = run.facts().get("resume")
    if noted is not None and noted["checkpoint"] is not None and noted["step"] > newest:
        path = run.path / "checkpoints" / noted["checkpoint"]
        found.append((Source(noted["step"], path, fresh=True), f"{path} is gone"))
    return found


def _require_another(run: RunDirectory, left: list[Source], error: str) -> None:
    if not left:
        raise ValueError(f"{error}; run {run.name!r} has no other save point: put its files back from a copy, or go"
                         " back to the model's weights (rollback --to 0)")


def _set_aside(run: RunDirectory, source: Source, error: str) -> None:
    log.warning("%s; the run goes on from what was saved before", error)
    if source.path.is_dir():
        savepoints.set_aside(source.path)
    else:
        run.note(resume=None)
    run.append("damaged", durable=True, step=source.step, error=error)


def find(run: RunDirectory, step: int | None, *, fresh: bool = False, checkpoint: bool = False) -> Source | None:
    """What was saved of ``step`` (None: what the run goes on from anyway; 0: the model's weights, told by None).

    ``fresh``: with moments of zero; a weights-only checkpoint is taken where there is no save point. ``checkpoint``:
    that in any case. ``ValueError`` where there is nothing of that step.
    """
    points, weights = sources(run), run.checkpoints()
    if step is None and not checkpoint and not points and savepoints.damaged(*run.saved_in):
        raise ValueError(f"run {run.name!r} has only damaged save points: put their files back from a copy, or go"
                         " back to the model's weights (rollback --to 0)")
    if step == 0 or (step is None and not checkpoint and not points):
        if not os.path.exists(run.config.model.flux):
            raise ValueError(f"run {run.name!r} cannot go back to the model's weights: {run.config.model.flux} is gone")
        return None
    found = [s for s in (weights if checkpoint else points) if step in (None, s.step)]
    if fresh and not found:
        found = [s for s in weights if s.step == step]
    if found:
        return dataclasses.replace(found[-1], fresh=fresh or found[-1].fresh)
    raise ValueError(_nothing(run, step, points, weights))


def take_back(
    run: RunDirectory, source: Source | None, *, skip: int | None = None, why: str = ""
) -> dict[str, Any]:  # fmt: skip
    """Have the run go on from ``source`` (None: the model's weights); returns the event. The lock is held.

    Later save points are removed and ``rollbacks`` goes up, so that its noise is another. ``skip``: the number of a
    batch to leave out from now on. ``why`` goes into the event ``rolled_back``.
    """
    at, note = 0, None
    if source is not None:
        at = source.step
        if source.fresh:
            note = {"step": at, "checkpoint": None if source.path.is_dir() else source.path.name}
    skipped = run.skipped if skip is None else (*run.skipped, skip)
    run.note(rollbacks=run.rollbacks + 1, resume=note, skipped=sorted(set(skipped)) or None)
    try:
        savepoints.remove_later(*run.saved_in, at)
    except OSError as error:
        raise ValueError(f"run {run.name!r} cannot go back to step {at} yet: a later save point could not be removed"
                         f" ({error.strerror or error}); close what has it open, then try again") from None
    told: dict[str, Any] = {"why": why, "skipped": skip, "fresh": note is not None or None}
    said = {k: v for k, v in told.items() if v is not None and v != ""}
    return run.append("rolled_back", durable=True, step=at, **said)


def renew_moments(run: RunDirectory) -> int:
    """Have the run go on from what it would go on from, with moments of zero; returns its step. The lock is held."""
    source = run.source()
    if source is None:  # they are
        return 0
    if not source.fresh:
        run.note(resume={"step": source.step, "checkpoint": None})
    return source.step


def _nothing(run: RunDirectory, step: int | None, points: list[Source], weights: list[Source]) -> str:
    if step is not None and step in (w.step for w in weights):
        return (f"of step {step} run {run.name!r} has only a weights-only checkpoint: choose fresh moments"
                " (--fresh-moments) to go on from it")
    have = [", ".join(str(s.step) for s in kind) or "none" for kind in (points, weights)]
    what = "checkpoint" if step is None else f"save point of step {step}"
    return f"run {run.name!r} has no {what}: it has {have[0]}; checkpoints: {have[1]}"

"""Train Steps' waiting: it ends at the target, on Cancel, Pause and Stop, and if the run fails or its worker dies."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..trainer.files import write_json
from . import bridge, called_off, pictures, registry, words
from .bridge_checkpoints import list_checkpoints
from .handles import PreviewSettings, RunHandle

if TYPE_CHECKING:
    from ..trainer.client import WorkerClient
    from ..trainer.run import RunDirectory

log = logging.getLogger(__name__)
GRAPH = "graph.json"
"""In the run's folder: ``prompt``, ``workflow`` (null where there was none) and ``node_id`` of what trained it last."""
POLL = 0.25
"""Seconds that the wait for news takes at most: Cancel is heard this fast."""
PACE = 0.05
"""Seconds between two looks: a tiny model makes many steps in it."""
PATIENCE = 60.0
"""Seconds that a run may rest where another client wanted to sample it, before it is told to go on."""
PARKING = 120.0
"""Seconds to wait on Cancel for the step to end and VRAM to come back, before the prompt ends anyway."""


@dataclass
class Outcome:
    handle: RunHandle
    lines: list[str] = field(default_factory=list)
    images: list[dict[str, str]] = field(default_factory=list)


def train(handle: RunHandle, steps: int, previews: PreviewSettings | None, *, node_id: str | None,
          graph: dict[str, Any] | None = None, workflow: dict[str, Any] | None = None) -> Outcome:
    """Train the handle's run until ``handle.step + steps``; see ``Outcome.lines`` for what happened.

    ``graph``, ``workflow``: what this is done for, in the executor's form and in the canvas's.
    """
    run, workflow_id = registry.open_directory(handle), (workflow or {}).get("id", "")
    if handle.saved:
        raise ValueError(f"run {run.name!r} comes from Open a Run at step {handle.step}, which is to look at: roll it"
                         " back to that step, then train it at its latest one")
    target = handle.step + steps
    reached = RunHandle(name=handle.name, uid=handle.uid, step=target)
    status = run.status()
    at, panel = status["resume_step"], _panel()
    list_checkpoints(run)  # those that were made without ComfyUI, too
    sampler = pictures.Sampler(run, previews)
    # A run that failed at its target may not have been saved there: its worker tries that again. Pictures that are
    # due where it is, and were cut short, are taken.
    if at > target or (at == target and status["state"] != "failed" and not _owed(sampler, at)):
        if panel is not None:
            panel.note(run.path, node_id, workflow_id)
        line = (f"Nothing to train: run {run.name!r} is at step {at} and this node's target is {target} "
                f"(step {handle.step} + {steps}). Raise steps to train further.")
        return _outcome(reached, [line], sampler.newest(handle.step, target))
    if at < handle.step:
        raise ValueError(f"run {run.name!r} is at step {at}, before the step {handle.step} that this node goes on "
                         "from: its later steps were lost or rolled back; queue the graph again")
    watching = contextlib.nullcontext() if panel is None else panel.watching(
        run.path, node_id=node_id, workflow_id=workflow_id)

    said = ""

    def say(text: str) -> None:
        nonlocal said
        if text == said:
            return
        said = text
        log.info("run %s: %s", run.name, text or "on it goes")
        if panel is not None:
            panel.say(run.path, text)

    started = time.monotonic()
    _keep_graph(run, graph, workflow, node_id)
    with watching, _renewed_on_error(run), sampler, _ended_by_the_panel(run):
        registry.cancellable(registry.require_data, run)
        say("encoding the prompts of the previews")
        sampler.encode_prompts()
        bridge.unload_models()
        say("opening the worker")
        client = registry.cancellable(registry.client, run.name, say)
        at = _now(client)["step"]
        say("")
        stops = [*([at] if handle.step < at and _owed(sampler, at) else []), *sampler.stops(at, target), target]
        missed = _train(client, at, target, list(dict.fromkeys(stops)), sampler, node_id, say)
        newest = sampler.newest(handle.step, target)
    losses = [loss for step, loss in run.losses() if step > at]
    lines = [f"Trained run {run.name!r} from step {at} to {target} in {_duration(time.monotonic() - started)}"
             if at < target else f"Run {run.name!r} was at its target of {target}: what was left to do there is done"]
    if (now := run.status())["loss_risen"]:
        lines.append(f"The loss is {now['loss_risen']:.3g} times what it was at first: this training has gone wrong. "
                     "Lower the learning rate and begin again, or go back to a save point from before.")
    if missed:
        named = ", ".join(map(str, missed[:10])) + (", ..." if len(missed) > 10 else "")
        lines.append(f"Pictures of {words.count(len(missed), 'step')} ({named}) were not taken: another program had "
                     "trained the run on.")
    if (now["target"] or 0) > target:
        lines.append(f"Another program trains it on, to {now['target']}.")
    if losses:
        lines[0] += f"; loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last"
    lines.append(f"The run is at its target of {target}: queueing again trains nothing, raise steps to train further.")
    return _outcome(reached, lines, newest)


def _outcome(reached: RunHandle, lines: list[str], newest: pictures.Kept | None) -> Outcome:
    """With the pictures of the newest step that has some, and a line that says what they show."""
    if newest is None:
        return Outcome(reached, lines)
    return Outcome(reached, [*lines, newest.line()], [bridge.ui_image(p) for p in newest.paths])


def _owed(sampler: pictures.Sampler, step: int) -> bool:
    """Whether pictures of this step are due and were not all taken."""
    return step > 0 and sampler.due(step) and sampler.recorded(step) is None


def _keep_graph(run: RunDirectory, graph: dict[str, Any] | None, workflow: dict[str, Any] | None,
                node_id: str | None) -> None:
    """Keep what trains the run beside it, so that it can be queued again whatever the canvas shows then."""
    if graph is None:
        return
    # The executor notes fingerprints in it, which would be taken for new ones when it is queued again.
    prompt = {key: {name: node[name] for name in node if name != "is_changed"} for key, node in graph.items()}
    try:
        write_json(run.path / GRAPH, {"prompt": prompt, "workflow": workflow, "node_id": node_id})
    except (OSError, ValueError, TypeError) as error:  # a full disk; a link that no client could have sent
        log.warning("the graph of run %s is not kept: %s", run.name, error)


def _train(client: WorkerClient, start: int, target: int, stops: list[int], sampler: pictures.Sampler,
           node_id: str | None, say: Callable[[str], None]) -> list[int]:
    """Train until ``target``, with pictures at ``stops``. Returns the steps whose pictures were due and not taken."""
    from ..trainer.protocol import RunMovedOn

    missed = []
    bar = bridge.Progress(target - start, node_id)
    with _parked_on_error(client, bar):
        registry.cancellable(client.let_sample, say=say)
        say("")
        for stop in stops:
            _wait(client, start, stop, target, bar, pause=sampler.due(stop))
            if sampler.due(stop) and _now(client)["step"] == stop:  # another program may have trained it on
                say(f"sampling the previews of step {stop}")
                with registry.ended_by(lambda: _require_wanted(client.run)):
                    with contextlib.suppress(RunMovedOn):  # trained on by another program, which this is not to end
                        taken = sampler.take(stop)
                        bar.update(stop - start, target - start, pictures.sheet(taken))
                    bridge.unload_models()
                    if stop < target:
                        registry.check_wanted()
                say("")
            if _owed(sampler, stop):
                missed.append(stop)
        if (further := _further(client, target)) > target:
            registry.cancellable(client.train, further)
    return missed


@contextlib.contextmanager
def _ended_by_the_panel(run: RunDirectory) -> Iterator[None]:
    """Pause and Stop on the panel end the prompt, whatever it waits for."""
    with called_off.trained_here(run.path, bridge.prompt_id()) as off:

        def check() -> None:
            if off.is_set():
                raise bridge.end_prompt()

        with registry.ended_by(check):
            yield


def _require_wanted(run: RunDirectory) -> None:
    """End the prompt if somebody has paused or stopped the run while it rests for pictures."""
    now = run.status()
    paused = now["state"] in ("paused", "stopped") and now["on_the_way"] is None
    if paused or (now["state"] == "finished" and not run.locked()):
        log.info("run %s was paused or stopped while its pictures were sampled", run.name)
        raise bridge.end_prompt()


def _further(client: WorkerClient, target: int) -> int:
    """``target``, or the larger one that another program has given the run, which trains or rests on its way."""
    now = _now(client)
    on_its_way = now["state"] == "training" or now["on_the_way"] is not None
    return max(target, now["target"] or 0) if on_its_way else target


def _wait(client: WorkerClient, start: int, stop: int, target: int, bar: bridge.Progress, *, pause: bool) -> None:
    """Have the run train until it is at ``stop``, and ``pause`` there. Raises what ended it before."""

    def go_on() -> float:
        until, ahead = _further(client, target), _now(client)["step"] < stop
        # It may have to wait for a worker that is saving, to exit.
        registry.cancellable(client.train, until, pause_at=stop if pause and (ahead or stop < until) else None)
        return time.monotonic() + PATIENCE

    patience, since = go_on(), _now(client)["last_event"]
    while True:
        status = registry.cancellable(client.status, since=since, wait=POLL)
        since = status["last_event"]
        if not _show_save(bar, status):
            bar.update(max(status["step"] - start, 0), target - start)
        if any(event["type"] == "checkpoint" for event in status["events"]):
            list_checkpoints(client.run)
        bridge.throw_if_cancelled()
        time.sleep(PACE)
        state, step = status["state"], status["step"]
        if state == "failed":
            raise RuntimeError(f"run {status['run']!r} failed at step {step}: {status['error']}")
        if state == "interrupted":
            raise RuntimeError(f"the worker of run {status['run']!r} is gone at step {step}: queue again "
                               f"to go on from step {status['resume_step']} (worker.log in its folder says more)")
        if step > stop or (step == stop and not pause and (status["target"] or 0) > target):  # another trains it on
            return
        if state not in ("paused", "finished", "stopped"):
            continue
        if step >= stop:
            return
        if state == "paused" and status["on_the_way"] is not None:  # for another client's pictures
            if time.monotonic() > patience:
                patience = go_on()
            elif status["worker"] != "idle":
                patience = time.monotonic() + PATIENCE
            continue
        if state == "finished":  # client.train has made it train, so somebody has since said until when
            raise ValueError(f"run {status['run']!r} finished at step {step}, before step {stop}: another program set "
                             f"its target to {status['target']} meanwhile; queue again to go on")
        # By the panel, or by another client: as the user's Cancel.
        log.info("run %s was %s at step %d", status["run"], state, step)
        raise bridge.end_prompt()


def _show_save(bar: bridge.Progress, status: dict[str, Any]) -> bool:
    """Have the bar show how far a save point or checkpoint is, if one is being written."""
    saving = status["saving"]
    if saving is not None:
        bar.update(saving["done"], saving["total"])
    return saving is not None


def _now(client: WorkerClient) -> dict[str, Any]:
    """The status without past events."""
    return registry.cancellable(client.status, since=1 << 53)


@contextlib.contextmanager
def _renewed_on_error(run: RunDirectory) -> Iterator[None]:
    """After an error Start is to run again, which encodes what is lost or damaged, and plans for what changed."""
    try:
        yield
    except Exception as error:
        if not bridge.ends_prompt(error):
            registry.renew(run)
        raise


@contextlib.contextmanager
def _parked_on_error(client: WorkerClient, bar: bridge.Progress) -> Iterator[None]:
    """Whatever ends the wait (Cancel is no ``Exception`` since 0.20): the run parks, so that VRAM comes back."""
    try:
        yield
    except BaseException:
        bridge.take_cancel()

        def look() -> None:
            _show_save(bar, client.run.status())

        def pause() -> None:
            # It may be dead: what went wrong first is what counts.
            with contextlib.suppress(Exception):
                client.pause()

        # Begun before anything looks for a Cancel: a second one may be there already, and only does not wait.
        pausing = threading.Thread(target=pause, name="flux-fft-pause", daemon=True)
        pausing.start()
        with contextlib.suppress(Exception):
            loads = client.run.status()["state"] == "preparing"  # minutes; Pause is not kept waiting for that
            with contextlib.nullcontext() if loads else registry.ended_by_cancel_alone():
                registry.cancellable(pausing.join, seconds=PARKING, meanwhile=look)
        raise


def _panel() -> Any:
    """The module that tells the panel; None where it could not be loaded."""
    from . import routes

    return routes


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"

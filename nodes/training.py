"""Train Steps' waiting: it ends at the target, on Cancel, Pause and Stop, and if the run fails or its worker dies."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import bridge, pictures, registry
from .handles import PreviewSettings, RunHandle

if TYPE_CHECKING:
    from ..trainer.client import WorkerClient

log = logging.getLogger(__name__)
POLL = 0.25
"""Seconds that the wait for news takes at most: Cancel is heard this fast."""
PACE = 0.05
"""Seconds between two looks: a tiny model makes many steps in it."""
SHOWN = 64
"""Pictures that the node shows at most, the newest; all are in the run's folder."""
PARKING = 120.0
"""Seconds to wait on Cancel for the step to end and VRAM to come back, before the prompt ends anyway."""


@dataclass
class Outcome:
    handle: RunHandle
    lines: list[str] = field(default_factory=list)
    images: list[dict[str, str]] = field(default_factory=list)


def train(handle: RunHandle, steps: int, previews: PreviewSettings | None, *, node_id: str | None,
          workflow_id: str = "") -> Outcome:
    """Train the handle's run until ``handle.step + steps``; see ``Outcome.lines`` for what happened."""
    run = registry.open_directory(handle)
    target = handle.step + steps
    reached = RunHandle(name=handle.name, uid=handle.uid, step=target)
    at = run.status()["resume_step"]
    panel = _panel()
    if at >= target:
        if panel is not None:
            panel.note(run.path, node_id, workflow_id)
        line = (f"Nothing to train: run {run.name!r} is at step {at} and this node's target is {target} "
                f"(step {handle.step} + {steps}). Raise steps to train further.")
        kept = pictures.Sampler(run, previews).newest(handle.step, target)
        return Outcome(reached, [line], [bridge.ui_image(p) for p in kept])
    if at < handle.step:
        raise ValueError(f"run {run.name!r} is at step {at}, before the step {handle.step} that this node goes on "
                         "from: its later steps were lost or rolled back; queue the graph again")
    watching = contextlib.nullcontext() if panel is None else panel.watching(
        run.path, node_id=node_id, workflow_id=workflow_id)

    def say(text: str) -> None:
        log.info("run %s: %s", run.name, text or "on it goes")
        if panel is not None:
            panel.say(run.path, text)

    started = time.monotonic()
    with watching, pictures.Sampler(run, previews) as sampler:
        say("encoding the prompts of the previews")
        sampler.encode_prompts()
        bridge.unload_models()
        say("opening the worker")
        client = registry.cancellable(registry.client, run.name, say)
        at = _now(client)["step"]
        say("")
        images = _train(client, at, target, sampler, node_id, say)
    losses = [loss for step, loss in run.losses() if step > at]
    lines = [f"Trained run {run.name!r} from step {at} to {target} in {_duration(time.monotonic() - started)}"]
    if losses:
        lines[0] += f"; loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last"
    lines.append(f"The run is at its target of {target}: queueing again trains nothing, raise steps to train further.")
    return Outcome(reached, lines, images)


def _train(client: WorkerClient, start: int, target: int, sampler: pictures.Sampler, node_id: str | None,
           say: Callable[[str], None]) -> list[dict[str, str]]:
    bar = bridge.Progress(target - start, node_id)
    images: list[dict[str, str]] = []
    with _parked_on_error(client):
        for stop in [*sampler.stops(start, target), target]:
            # It may have to wait for a worker that is saving, to exit.
            registry.cancellable(client.train, target, pause_at=stop if stop < target else None)
            _wait(client, start, stop, bar)
            if sampler.due(stop):
                say(f"sampling the previews of step {stop}")
                taken = sampler.take(stop)
                images += [bridge.ui_image(p) for p in taken]
                bar.update(stop - start, target - start, pictures.thumbnail(taken))
                bridge.unload_models()
                say("")
    return images[-SHOWN:]


def _wait(client: WorkerClient, start: int, stop: int, bar: bridge.Progress) -> None:
    """Until the run is at ``stop``. Raises what ended it before."""
    since = _now(client)["last_event"]
    while True:
        status = registry.cancellable(client.status, since=since, wait=POLL)
        since = status["last_event"]
        bar.update(max(status["step"] - start, 0))
        bridge.throw_if_cancelled()
        time.sleep(PACE)
        state = status["state"]
        if state == "failed":
            raise RuntimeError(f"run {status['run']!r} failed at step {status['step']}: {status['error']}")
        if state == "interrupted":
            raise RuntimeError(f"the worker of run {status['run']!r} is gone at step {status['step']}: queue again "
                               f"to go on from step {status['resume_step']} (worker.log in its folder says more)")
        if state in ("paused", "finished", "stopped") and status["step"] >= stop:
            return
        if state in ("paused", "stopped"):  # by the panel, or by another client: as the user's Cancel
            log.info("run %s was %s at step %d", status["run"], state, status["step"])
            raise bridge.end_prompt()


def _now(client: WorkerClient) -> dict[str, Any]:
    """The status without past events."""
    return registry.cancellable(client.status, since=1 << 53)


@contextlib.contextmanager
def _parked_on_error(client: WorkerClient) -> Iterator[None]:
    """Whatever ends the wait (Cancel is no ``Exception`` since 0.20): the run parks, so that VRAM comes back."""
    try:
        yield
    except BaseException:
        _park(client)
        raise


def _park(client: WorkerClient) -> None:
    def pause() -> None:
        with contextlib.suppress(Exception):  # it may be dead: what went wrong first is what counts
            client.pause()

    thread = threading.Thread(target=pause, name="flux-fft-pause", daemon=True)
    thread.start()
    deadline = time.monotonic() + PARKING
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.1)
        bridge.throw_if_cancelled()  # a second Cancel does not wait


def _panel() -> Any:
    """The module that tells the panel; None where it could not be loaded."""
    from . import routes

    return routes


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"

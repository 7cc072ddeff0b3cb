"""The other end: opens a run's worker, or starts one, and asks it things. Safe to use from several threads.

Every thread that asks something gets a connection for as long as the answer takes, so a long prediction keeps nobody
from asking for the status. A worker that has ended in good order (stopped, or idle for long) is started again where
its weights are needed; one that died raises ``WorkerDied``, with its last words.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .export.write import ExportOptions
from .link import WorkerDied, WorkerLink
from .protocol import ON_THE_WAY, RunMovedOn, WorkerClosing, WorkerError
from .run import RunDirectory
from .settings import to_dict

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RunMovedOn", "WorkerClient", "WorkerClosing", "WorkerDied", "WorkerError", "open_run"]

log = logging.getLogger(__name__)


def open_run(run_dir: str | os.PathLike[str], *, launch: bool = True, owner: bool = False,
             idle_exit: float | None = None, say: Callable[[str], None] = log.info,
             check: Callable[[], None] = lambda: None) -> WorkerClient:
    """A client of the run's worker; ``launch``: one is started where none is (else that is a ``ValueError``).

    ``owner``: the worker lives for this client: when that is gone (its process ended, or nobody holds it any more)
    without ``close``, the worker finishes its step, saves and exits. ``idle_exit``: seconds without work after which
    a worker started here saves and exits. ``say`` is told, in one line, what is waited for: a worker that is saving,
    or one of an older version; ``check`` is called many times meanwhile and may raise, to give up.
    Raises ``WorkerDied`` with its last words if the worker cannot start.
    """
    client = WorkerClient(RunDirectory(run_dir), may_launch=launch, owner=owner, idle_exit=idle_exit, say=say,
                          check=check)
    client.open()
    return client


class WorkerClient(WorkerLink):
    """A run's worker, as others see it. Made by ``open_run``."""

    # -- what can be asked

    def status(self, since: int = 0, wait: float = 0.0) -> dict[str, Any]:
        """The run's status, with its ``events`` after ``since``; waits up to ``wait`` seconds for one.

        Where no worker lives any more, what the disk says.
        """
        found = self._ask_or("status", patient=False, since=since, wait=wait)
        return found if found is not None else {**self.run.status(), "events": self.run.events(since)}

    def train(self, until: int, pause_at: int | None = None) -> None:
        """Set the target and return at once: ``status`` tells how far it is. At or beyond it nothing happens.

        ``pause_at``: on the way the run pauses at that step, in memory and unsaved, for a picture to be sampled.
        """
        self._ask_live("train", until=until, pause_at=pause_at)

    def pause(self, wait: bool = True) -> None:
        """Stop within one step and give back the VRAM; nothing is written. ``wait``: return when that is so."""
        self._ask_or("pause", patient=True, wait=wait)

    def let_sample(self, patience: float = ON_THE_WAY, say: Callable[[str], None] = log.info) -> None:
        """Wait while the run rests on its way, for another client's pictures: they are of the step that it is at.

        ``say`` is told so, once, if it does.
        """
        until, told = time.monotonic() + patience, False
        while (now := self.status(since=1 << 53))["state"] == "paused" and now["on_the_way"] is not None:
            if not told:
                told = True
                say(f"waiting for another program's pictures of step {now['step']}")
            if now["worker"] != "idle":
                until = time.monotonic() + patience
            if time.monotonic() > until:
                return
            self._check()
            time.sleep(0.25)

    def park(self) -> None:
        """Have a run that rests give back its VRAM; one that rests on its way, for pictures, goes on as it would have.
        """
        self._ask_or("park", patient=False)

    def stop(self) -> None:
        """Stop within one step, save and exit; returns when the process has let go of the run."""
        self._ask_or("stop", patient=True)
        self._wait_until_unlocked()
        self._forget()

    def save(self) -> int:
        """Make a save point now; returns its step."""
        return self._ask_live("save")

    def set_lr(self, lr: float) -> None:
        """Train with this learning rate from the next step on, until the settings of the run name another one.

        It is the one that schedules start from. ``ValueError`` where it is none.
        """
        self._ask_live("set_lr", lr=lr)

    def roll_back(self, step: int | None = None, *, fresh: bool = False) -> int:
        """Stop, and go back to the save point or checkpoint of ``step`` (None: the newest); returns its step.

        What was trained since is lost. ``fresh``: the optimizer's moments begin anew, as after a checkpoint they must.
        """
        return self._ask_live("roll_back", step=step, fresh=fresh)

    def predict(self, x: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor, guidance: Tensor | None, *,
                step: int | None = None, ema: bool = False) -> Tensor:
        """Velocity of the weights as they are, on the CPU. ``RunMovedOn`` if the run is not at ``step``.

        ``ema``: of their running average; ``ValueError`` where the run keeps none.
        Shapes as in ``trainer.flux``: ``x`` [B, C, h, w] in model space, ``timestep`` [B] in 0..1, ``context``
        [B, T, D], ``pooled`` [B, P], ``guidance`` [B].
        """
        tensors = {"x": x, "timestep": timestep, "context": context, "pooled": pooled}
        if guidance is not None:
            tensors["guidance"] = guidance
        return self._live({"op": "predict", "step": step, "ema": ema}, tensors)[1]["velocity"]

    def evaluate(self) -> dict[str, Any]:
        """``{"step", "loss"}``: the loss at fixed noise and timesteps, of the weights as they are."""
        return self._ask_live("evaluate")

    def export(self, path: str | os.PathLike[str], dtype: str = "bf16", metadata: Mapping[str, str] | None = None,
               **options: Any) -> dict[str, Any]:
        """Write a file of the run to ``path``: its path, bytes, step, dtype and a line of text.

        ``options``: the fields of ``export.write.ExportOptions`` (``overwrite``, ``lora_rank``, ``ema``, ...).
        """
        whole = ExportOptions(dtype=dtype, metadata=dict(metadata or {}), **options)
        return self._ask_live("export", path=os.path.abspath(path), options=to_dict(whole))

    def cancel_export(self) -> None:
        """Have the export under way end, and leave nothing; who asked for it is told so."""
        self._ask_or("cancel_export", patient=False)

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

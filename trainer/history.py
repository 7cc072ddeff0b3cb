"""What a run's events say so far; ``events.py`` lists them."""

from __future__ import annotations

import statistics
from typing import Any

RESTING = ("paused", "finished", "failed")
"""States in which a worker that lives does nothing, and holds its memory."""
WINDOW = 20
"""Steps over which the seconds per step are taken (their median: a save or a pause does not tilt it)."""


class History:
    """State, step, target, losses and what else the events tell. Records of a lost past are dropped."""

    def __init__(self) -> None:
        self.last = 0
        self.state: str | None = None
        self.step = 0
        self.target: int | None = None
        self.error: str | None = None
        self.on_the_way: int | None = None
        """The step at which it is paused because a client asked for that, to sample; it goes on by itself."""
        self.steps: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.lr_set: float | None = None
        """The learning rate that was set while the run trained; None: that of the settings."""
        self.unsaved_seconds = 0.0
        """Seconds of training since the newest save point: what a power cut would cost now."""
        self.spiked: int | None = None
        """The step of the newest spike that was told."""
        self.save_failed: str | None = None
        """Why the newest save point could not be made; None: it could."""
        self.memory: dict[str, Any] = {}
        """As measured last: while it trained, or when it gave back its VRAM."""

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event in."""
        self.last = max(self.last, event["n"])
        take = getattr(self, f"_on_{event['type']}", None)
        if take is not None:
            take(event)

    def _on_state(self, event: dict[str, Any]) -> None:
        self.state = event["state"]
        self.error, self.on_the_way = event.get("error"), event.get("on_the_way")
        self.target = event.get("target", self.target)
        if self.state not in RESTING:
            self.memory = {}  # until the next measurement

    def _on_target(self, event: dict[str, Any]) -> None:
        self.target = event["target"]

    def _on_step(self, event: dict[str, Any]) -> None:
        self.step = event["step"]
        self.steps.append(event)
        self.unsaved_seconds += event.get("seconds") or 0.0

    def _on_eval(self, event: dict[str, Any]) -> None:
        self.evals.append(event)

    def _on_validated(self, event: dict[str, Any]) -> None:
        self.validations.append(event)

    def _on_spike(self, event: dict[str, Any]) -> None:
        self.spiked = event["step"]

    def _on_saved(self, event: dict[str, Any]) -> None:
        self.unsaved_seconds, self.save_failed = 0.0, None

    def _on_save_failed(self, event: dict[str, Any]) -> None:
        self.save_failed = event["error"]

    def _on_lr(self, event: dict[str, Any]) -> None:
        self.lr_set = event["lr"]

    def _on_config(self, event: dict[str, Any]) -> None:
        if "optimizer.lr" in event["changed"]:
            self.lr_set = None

    def _on_memory(self, event: dict[str, Any]) -> None:
        self.memory = event

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self.step, self.unsaved_seconds, self.spiked = event["step"], 0.0, None
        self.steps, self.evals, self.validations = (
            [e for e in told if e["step"] <= self.step] for told in (self.steps, self.evals, self.validations))
        if self.state == "finished" and self.step < (self.target or 0):
            self.state = "paused"

    def _on_rolled_back(self, event: dict[str, Any]) -> None:
        self._on_resumed(event)
        if self.state == "failed":  # by what is now a lost past
            self.state, self.error = "paused", None

    def summary(self) -> dict[str, Any]:
        """The numbers that a panel shows, as plain JSON types; None where there is none yet."""
        recent = [e["seconds"] for e in self.steps[-WINDOW:] if "seconds" in e]
        seconds = statistics.median(recent) if recent else None
        to_go = max(0, self.target - self.step) if self.target is not None else None
        last = self.steps[-1] if self.steps else {}
        return {
            "state": self.state,
            "step": self.step,
            "target": self.target,
            "loss": last.get("loss"),
            "lr": last.get("lr"),
            "lr_set": self.lr_set,
            "seconds_per_step": seconds,
            "error": self.error,
            "on_the_way": self.on_the_way,
            "loss_first": self.steps[0]["loss"] if self.steps else None,
            "eval_loss": self.evals[-1]["loss"] if self.evals else None,
            "eval_loss_first": self.evals[0]["loss"] if self.evals else None,
            "validation_loss": self.validations[-1]["loss"] if self.validations else None,
            "validation_loss_first": self.validations[0]["loss"] if self.validations else None,
            "seconds_left": to_go * seconds if seconds is not None and to_go is not None else None,
            "images_seen": last.get("images"),
            "epoch": last.get("epoch"),
            "unsaved_seconds": round(self.unsaved_seconds, 3),
            "save_failed": self.save_failed,
            "vram_gb": self.memory.get("vram_gb"),
            "ram_gb": self.memory.get("ram_gb"),
            "waits_for": self.memory.get("waits"),
            "idle_exit": self.memory.get("idle_exit"),
            "last_event": self.last,
        }

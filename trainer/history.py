"""What a run's events say so far; ``events.py`` lists them."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

from .spikes import ENDS, risen

RESTING = ("paused", "finished", "failed")
"""States in which a worker that lives does nothing, and holds its memory."""
MEASURE = ("dataset", "recipe.loss", "recipe.huber_delta", "recipe.timestep_sampling", "recipe.shift")
"""Beginnings of the names of settings that say what a loss is the loss of."""
NEEDED = {"step": ("step", "loss", "lr"), "eval": ("step", "loss"), "validated": ("step", "loss")}
"""Fields that readers of these events rely on: a line without them is none of ours."""
WINDOW = 20
"""Steps over which the seconds per step are taken (their median: a save or a pause does not tilt it)."""


class Steps(Sequence[dict[str, Any]]):
    """``step`` events in order, as a list of them would have them; the usual ones take 64 bytes each."""

    FIELDS = ("n", "t", "type", "step", "loss", "lr", "seconds", "images", "epoch")
    """Of a usual one, and their types:"""
    TYPES = (int, float, str, int, float, float, float, int, float)
    NUMBERS = ("n", "t", "step", "loss", "lr", "seconds", "images", "epoch")
    _EXACT = 1 << 53

    def __init__(self) -> None:
        self._rows = array("d")
        self._others: dict[int, dict[str, Any]] = {}
        """Those that are not usual (a loss that is none, a step that was cut short, an older version's), by place;
        of each the row holds the step."""

    def append(self, event: dict[str, Any]) -> None:
        """Add one that is not changed any more, unless it has no number yet."""
        if tuple(event) == self.FIELDS and tuple(map(type, event.values())) == self.TYPES:
            n, t, _, step, loss, lr, seconds, images, epoch = event.values()
            if 0 < n < self._EXACT and 0 <= step < self._EXACT and 0 <= images < self._EXACT:
                self._rows.extend((n, t, step, loss, lr, seconds, images, epoch))
                return
        row = array("d", [0.0] * len(self.NUMBERS))
        row[self.NUMBERS.index("step")] = event["step"]  # a line that has none of it raises, and has changed nothing
        self._others[len(self)] = event
        self._rows.extend(row)

    def __len__(self) -> int:
        return len(self._rows) // len(self.NUMBERS)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [self._at(i) for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self._at(place % len(self))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._at, range(len(self)))

    def _at(self, place: int) -> dict[str, Any]:
        if (other := self._others.get(place)) is not None:
            return other
        wide = len(self.NUMBERS)
        n, t, step, loss, lr, seconds, images, epoch = self._rows[place * wide : place * wide + wide]
        return {"n": int(n), "t": t, "type": "step", "step": int(step), "loss": loss, "lr": lr, "seconds": seconds,
                "images": int(images), "epoch": epoch}  # fmt: skip

    def column(self, name: str) -> list[Any]:
        """One field of all of them, as ``[e.get(name) for e in steps]``, only faster."""
        values: list[Any] = self._rows[self.NUMBERS.index(name) :: len(self.NUMBERS)].tolist()
        if self.TYPES[self.FIELDS.index(name)] is int:
            values = list(map(int, values))
        for place, event in self._others.items():
            values[place] = event.get(name)
        return values

    def until(self, step: int) -> Steps:
        """Those up to a step; what was before is no more of use."""
        wide = len(self.NUMBERS)
        places = [i for i, at in enumerate(self._rows[self.NUMBERS.index("step") :: wide]) if at <= step]
        if not places or places[-1] == len(places) - 1:  # the first ones: so it is unless a line was lost
            del self._rows[wide * len(places) :]
            self._others = {i: event for i, event in self._others.items() if i < len(places)}
            return self
        kept = Steps()
        for place in places:
            kept.append(self._at(place))
        return kept


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
        self.steps = Steps()
        self.alike = 0
        """The first of ``steps`` from which on losses can be compared: before, they were measured otherwise."""
        self.evals: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.lr_set: float | None = None
        """The learning rate that was set while the run trained; None: that of the settings."""
        self.unsaved_seconds = 0.0
        """Seconds of training since the newest save point: what a power cut would cost now."""
        self.save_clock = 0.0
        """Seconds of training since a save point was made or tried, or the run opened or taken back: what the worker
        goes by that saves every so many minutes."""
        self.spiked: int | None = None
        """The step of the newest spike that was told."""
        self.save_failed: str | None = None
        """Why the newest save point could not be made; None: it could."""
        self.memory: dict[str, Any] = {}
        """As measured last: while it trained, or when it gave back its VRAM."""

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event in."""
        self.last = max(self.last, event["n"])
        if missing := [name for name in NEEDED.get(event["type"], ()) if name not in event]:
            raise LookupError(f"an event {event['type']!r} without {', '.join(missing)}")
        take = getattr(self, f"_on_{event['type']}", None)
        if take is not None:
            take(event)

    def _on_state(self, event: dict[str, Any]) -> None:
        self.state = event["state"]
        self.error, self.on_the_way = event.get("error"), event.get("on_the_way")
        self.target = event.get("target", self.target)
        if self.state not in RESTING:
            self.memory = {}  # until the next measurement
        if self.state == "preparing":
            self.save_clock = 0.0

    def _on_target(self, event: dict[str, Any]) -> None:
        self.target = event["target"]

    def _on_step(self, event: dict[str, Any]) -> None:
        self.step = event["step"]
        self.steps.append(event)
        seconds = event.get("seconds") or 0.0
        self.unsaved_seconds += seconds
        self.save_clock += seconds

    def _on_eval(self, event: dict[str, Any]) -> None:
        self.evals.append(event)

    def _on_validated(self, event: dict[str, Any]) -> None:
        self.validations.append(event)

    def _on_spike(self, event: dict[str, Any]) -> None:
        self.spiked = event["step"]

    def _on_saved(self, event: dict[str, Any]) -> None:
        self.unsaved_seconds, self.save_clock, self.save_failed = 0.0, 0.0, None

    def _on_save_failed(self, event: dict[str, Any]) -> None:
        self.save_failed, self.save_clock = event["error"], 0.0

    def _on_lr(self, event: dict[str, Any]) -> None:
        self.lr_set = event["lr"]

    def _on_config(self, event: dict[str, Any]) -> None:
        if "optimizer.lr" in event["changed"]:
            self.lr_set = None
        if any(name.startswith(MEASURE) for name in event["changed"]):
            self.alike = len(self.steps)

    def _on_memory(self, event: dict[str, Any]) -> None:
        self.memory = event

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self.step, self.unsaved_seconds, self.save_clock, self.spiked = event["step"], 0.0, 0.0, None
        self.steps = self.steps.until(self.step)
        self.alike = min(self.alike, len(self.steps))
        self.evals, self.validations = (
            [e for e in told if e["step"] <= self.step] for told in (self.evals, self.validations))
        if self.state == "finished" and self.step < (self.target or 0):
            self.state = "paused"

    def _on_rolled_back(self, event: dict[str, Any]) -> None:
        self._on_resumed(event)
        if self.state == "failed":  # by what is now a lost past
            self.state, self.error = "paused", None

    def _risen(self) -> float | None:
        """How many times what it was the loss is, if it has gone up for good; see ``spikes.risen``."""
        alike = max(self.alike, len(self.steps) - ENDS)
        first, last = self.steps[self.alike : self.alike + ENDS], self.steps[alike:]
        return risen([e["loss"] for e in first], [e["loss"] for e in last])

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
            "loss_risen": self._risen(),
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

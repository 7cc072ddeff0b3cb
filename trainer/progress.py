"""A progress bar for terminals, lines now and then for everything else, and figures as words."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

WIDTH = 24
LINE_SECONDS = 10.0
"""Seconds between two lines where the output is no terminal."""


class Bar:
    """Shows ``done`` of ``total``. On a terminal one line is drawn over; else a line is written now and then."""

    def __init__(self, total: int, *, stream: TextIO | None = None) -> None:
        self.total = total
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._drawn = 0
        self._next = 0.0

    def update(self, done: int, text: str = "") -> None:
        """Show that ``done`` of the total is done, with ``text`` behind it."""
        share = min(done / self.total, 1.0) if self.total else 1.0
        if self._live:
            filled = round(share * WIDTH)
            self._draw(f"[{'#' * filled}{'.' * (WIDTH - filled)}] {100 * share:3.0f} %  {done}/{self.total}  {text}")
        elif (now := time.monotonic()) >= self._next or done >= self.total:
            self._next = now + LINE_SECONDS
            self._stream.write(f"{done}/{self.total}  {text}\n")
            self._stream.flush()

    def say(self, text: str) -> None:
        """Write a line that stays, above the bar."""
        self.close(keep=False)
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self, *, keep: bool = True) -> None:
        """Leave the bar as it is, or (``keep=False``) wipe it, and go to a fresh line."""
        if self._drawn:
            self._stream.write("\n" if keep else "\r" + " " * self._drawn + "\r")
            self._stream.flush()
            self._drawn = 0

    def _draw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._drawn))
        self._stream.flush()
        self._drawn = len(line)


def count(number: int, what: str) -> str:
    """``1 picture``, ``2 pictures``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(count: int) -> str:
    """``1.20 GB``, ``34.5 MB``, of bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float | None) -> str:
    """``0:05:10``; ``-`` for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def training_text(status: dict[str, Any]) -> str:
    """Loss, learning rate, speed and time left, from a run's status."""
    loss, lr, rate = status["loss"], status["lr"], status["seconds_per_step"]
    parts = [
        f"loss {loss:.4f}" if loss is not None else "",
        f"lr {lr:.3g}" if lr is not None else "",
        f"{rate:.2f} s/step" if rate is not None else "",
        f"{duration(status['seconds_left'])} left" if status["seconds_left"] is not None else "",
    ]
    return "  ".join(part for part in parts if part)

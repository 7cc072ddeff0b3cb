"""How fast something goes, and how long it will take."""

from __future__ import annotations

import time

from ..progress import duration


class Pace:
    """Of several stages, one after the other."""

    def __init__(self) -> None:
        self._stage, self._started, self._first = "", 0.0, 0

    def text(self, stage: str, done: int, total: int) -> str:
        """``images: 120 of 1000, 4.2 a second, 0:03:29 left``. The time counts from the first call for a stage."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._first = stage, now, done
        text, passed, more = f"{stage}: {done} of {total}", now - self._started, done - self._first
        if more <= 0 or passed <= 0:
            return text
        rate = more / passed
        return f"{text}, {rate:.3g} a second, {duration((total - done) / rate)} left"

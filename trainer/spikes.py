"""Losses that jump, and losses that have gone up for good: told from the noise that a loss has from batch to batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

WINDOW = 50
"""Losses before a step that say what is usual."""
FEWEST = 10
"""With fewer than these nothing is known to be usual."""
LEAST, MOST = 6.0, 10.0
"""A loss below ``LEAST`` times the usual is no spike, however steady the losses were (near its end the tiny demo's jump
to four times the usual), and one of ``MOST`` times the usual is one, however they spread."""
SPREADS = 6.0
"""So many spreads above the usual is a spike. Losses of batches spread by factors, so the logarithm is looked at."""
ENDS, RISEN = 20, 3.0
"""So many losses at the start and at the end are compared; a training whose loss is so many times what it was has gone
wrong: with a noise level of its own for every picture, medians of 20 differ by less than a factor of two."""
QUIET = 20
"""Steps after a spike in which no other is told: what follows belongs to it."""


def usual(recent: Sequence[float], loss: float) -> float | None:
    """The usual loss, the median of ``recent``, if ``loss`` is a spike above it; else None.

    The spread is the median distance from the median, times 1.4826 (that of a normal distribution's standard
    deviation), between logarithms: neither is moved by a few spikes among ``recent``.
    """
    known = [math.log(one) for one in recent[-WINDOW:] if one and one > 0 and math.isfinite(one)]
    if len(known) < FEWEST or not loss > 0:
        return None
    middle = statistics.median(known)
    spread = 1.4826 * statistics.median(abs(one - middle) for one in known)
    height = min(max(math.log(LEAST), SPREADS * spread), math.log(MOST))
    return math.exp(middle) if math.log(loss) >= middle + height else None


def risen(first: Sequence[float | None], last: Sequence[float | None]) -> float | None:
    """How many times the median of the ``last`` losses is that of the ``first``, if that is ``RISEN`` or more.

    None, too, where fewer than ``FEWEST`` of either are numbers.
    """
    parts = [[x for x in part if x is not None and math.isfinite(x)] for part in (first, last)]
    if min(map(len, parts)) < FEWEST:
        return None
    before, now = map(statistics.median, parts)
    return now / before if now >= RISEN * before > 0 else None


def spikes(losses: Sequence[float]) -> list[int]:
    """The places in a whole series at which a spike is told, as a run tells them one by one."""
    told: list[int] = []
    for place, loss in enumerate(losses):
        if usual(losses[max(0, place - WINDOW) : place], loss) and not (told and place - told[-1] <= QUIET):
            told.append(place)
    return told

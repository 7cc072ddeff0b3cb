"""Checks shared by the update rules."""

from __future__ import annotations

import math


def check_betas(betas: tuple[float, ...], count: int) -> None:
    """Raise ``ValueError`` unless there are ``count`` betas in [0, 1)."""
    if len(betas) != count:
        raise ValueError(f"betas is {betas}: give {count} numbers")
    for beta in betas:
        if not 0 <= beta < 1:
            raise ValueError(f"betas is {betas}: give numbers from 0 up to but not 1")


def check_numbers(**values: float) -> None:
    """Raise ``ValueError`` naming the first value that is negative or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}: give a number of at least 0")

"""What the update rules share: checks, and steps whose factor may be a number or a 0-d tensor.

Eager code passes numbers. Compiled code passes tensors, or every learning rate would be compiled anew.
"""

from __future__ import annotations

import math

from torch import Tensor

Factor = float | Tensor


def add_(out: Tensor, other: Tensor, factor: Factor) -> Tensor:
    """``out += factor * other``."""
    return out.add_(other * factor) if isinstance(factor, Tensor) else out.add_(other, alpha=factor)


def addcdiv_(out: Tensor, above: Tensor, below: Tensor, factor: Factor) -> Tensor:
    """``out += factor * above / below``."""
    if isinstance(factor, Tensor):
        return out.add_(above / below * factor)
    return out.addcdiv_(above, below, value=factor)


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

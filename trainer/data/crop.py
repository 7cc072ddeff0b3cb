"""Which part of a picture is kept where its shape is not its bucket's."""

from __future__ import annotations

import numpy as np
from PIL import Image

_SMALL = 256
"""Longer side in pixels of the copy that detail is looked for in."""


def crop_box(image: Image.Image, bucket: tuple[int, int], crop: str) -> tuple[float, float, float, float]:
    """The largest part of a picture with the shape of ``bucket`` (width, height): left, top, right, bottom in pixels.

    ``crop``: ``centre``; ``top`` (of a picture taller than its bucket; else the centre); or ``focus``: the place with
    the most detail, which is the sum over a grey copy, 256 px long, of the absolute differences between neighbours
    (of equal places the one nearest the centre).
    """
    assert crop in ("centre", "top", "focus")
    scale = max(bucket[0] / image.width, bucket[1] / image.height)
    w, h = min(image.width, bucket[0] / scale), min(image.height, bucket[1] / scale)
    spare_x, spare_y = image.width - w, image.height - h
    x, y = spare_x / 2, spare_y / 2
    if crop == "top":
        y = 0.0
    elif crop == "focus" and max(spare_x, spare_y) > 0:
        across = spare_x > 0
        part = _busiest(detail(image, across), (w / image.width) if across else (h / image.height))
        x, y = (x if part is None else part * spare_x, y) if across else (x, y if part is None else part * spare_y)
    # Rounding may go over the edge, which Pillow refuses.
    return x, y, min(x + w, image.width), min(y + h, image.height)


def detail(image: Image.Image, across: bool) -> np.ndarray:
    """How much happens in each column (``across``) or row of a picture's grey copy: int64 [columns or rows]."""
    scale = min(1.0, _SMALL / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    grey = np.asarray(image.resize(size, Image.Resampling.BOX).convert("L"), dtype=np.int64)
    total = np.zeros(grey.shape, dtype=np.int64)
    for axis in (0, 1):
        step = np.abs(np.diff(grey, axis=axis))
        # Each difference counts for both of its pixels, so that a picture and its mirror image agree.
        total += np.pad(step, [(1, 0) if a == axis else (0, 0) for a in (0, 1)])
        total += np.pad(step, [(0, 1) if a == axis else (0, 0) for a in (0, 1)])
    return total.sum(axis=0 if across else 1)


def _busiest(profile: np.ndarray, share: float) -> float | None:
    """Where the window that covers ``share`` of a profile holds most: 0 at its start .. 1 at its end; None: centre."""
    count = len(profile)
    window = min(count, max(1, round(share * count)))
    places = count - window
    if places == 0:
        return None
    sums = np.cumsum(np.concatenate([[0], profile]))
    held = sums[window:] - sums[:-window]
    best = np.flatnonzero(held == held.max())
    nearest = int(best[np.argmin(np.abs(2 * best - places))])
    return None if abs(2 * nearest - places) <= 1 else nearest / places

"""Sizes that pictures are trained at: one area, many shapes."""

from __future__ import annotations

import functools

from ..config import DatasetConfig

Bucket = tuple[int, int]
"""Width and height in image pixels, both multiples of the bucket step."""


@functools.lru_cache(maxsize=16)
def bucket_sizes(resolution: int, step: int) -> tuple[Bucket, ...]:
    """Every bucket of a resolution: area at most resolution squared, sides from half to twice the resolution."""
    square = resolution // step * step
    low, high = max(step, square // 2 // step * step), 2 * square
    sizes = {(square, square)}
    for a in range(low, high + 1, step):
        b = min(high, resolution * resolution // a // step * step)
        if b >= low:
            sizes |= {(a, b), (b, a)}
    return tuple(sorted(sizes))


def cropped_share(width: int, height: int, bucket: Bucket) -> float:
    """Share of a picture's area that a centre crop to the bucket's shape cuts away, 0..1."""
    ratio = (width * bucket[1]) / (height * bucket[0])
    return 1 - min(ratio, 1 / ratio)


def enlargement(width: int, height: int, bucket: Bucket) -> float:
    """Factor by which a picture is enlarged to cover its bucket (below 1: reduced)."""
    return max(bucket[0] / width, bucket[1] / height)


def buckets_for(width: int, height: int, config: DatasetConfig) -> tuple[Bucket, ...]:
    """The buckets that a picture is trained in: one for each resolution of ``config``, in its order, each once.

    Without ``config.upscale`` a resolution that the picture cannot fill is left out; where it fills none, it gets
    the smallest one's bucket, shrunk. Raises ``ValueError`` if it is smaller than one step then.
    """
    resolutions = dict.fromkeys((config.resolution, *config.more_resolutions))
    best = {r: _nearest(width, height, r, config.bucket_step) for r in resolutions}
    if not config.upscale:
        filled = {r: b for r, b in best.items() if enlargement(width, height, b) <= 1}
        best = filled or {min(best): _shrunk(width, height, best[min(best)], config.bucket_step)}
    return tuple(dict.fromkeys(best.values()))


@functools.lru_cache(maxsize=4096)
def _nearest(width: int, height: int, resolution: int, step: int) -> Bucket:
    """The bucket that cuts the least away; of equals the larger."""
    assert width > 0 and height > 0
    sizes = bucket_sizes(resolution, step)
    return min(sizes, key=lambda b: (round(cropped_share(width, height, b), 6), -b[0] * b[1], b))


def _shrunk(width: int, height: int, bucket: Bucket, step: int) -> Bucket:
    if min(width, height) < step:
        raise ValueError(
            f"is {width} x {height} px, less than one bucket step of {step}: allow upscaling or use a larger picture"
        )
    return min(bucket[0], width // step * step), min(bucket[1], height // step * step)

"""How fast a folder is scanned, beside a plain Pillow decode loop on all cores (``python -m benchmarks.scan --json``).

Pictures of several kinds are drawn into a temporary folder, with captions. Then, in turns: our scan (which finds the
files, decodes all of each, hashes it, reads its caption and chooses its bucket), and ``Image.open(path).load()`` of the
same files in a pool of as many threads. Each turn goes over all kinds; the order changes from turn to turn. The last
line is one JSON object:

- ``kinds``: for each kind ``images``, and images per second of ``scan`` and ``pillow`` (medians) and their ``ratio``
  (the median of the turns' ratios).
- ``ratio``: the time of Pillow for all kinds but ``small`` over that of the scan, the median of the turns. ``small``
  pictures are of a size that nobody trains; there most of the time is Python's, whose threads take turns.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data.pool import cores
from trainer.data.scan import survey

KINDS: dict[str, tuple[int, tuple[int, int], str, dict[str, Any]]] = {
    "jpeg": (24, (1600, 1200), "jpg", {"quality": 92}),
    "progressive": (8, (1600, 1200), "jpg", {"quality": 92, "progressive": True}),
    "png": (12, (1024, 1024), "png", {}),
    "transparent": (8, (1024, 1024), "png", {}),
    "webp": (8, (1024, 1024), "webp", {"quality": 90}),
    "small": (400, (96, 96), "png", {}),
}
"""Kind -> how many pictures, their size, extension and how they are saved."""


def draw(size: tuple[int, int], seed: int, alpha: bool = False) -> Image.Image:
    """Shapes of several sizes and a little grain: it compresses as a photo does."""
    chance = np.random.default_rng(seed)
    total = np.zeros((size[1], size[0], 3), dtype=np.float32)
    for cells, strength in ((4, 80), (24, 40), (120, 20)):
        small = chance.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        part = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)
        total += np.asarray(part, dtype=np.float32) * (strength / 140)
    total += chance.normal(0, 3, total.shape)
    image = Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))
    if alpha:
        fade = np.tile(np.linspace(0, 255, size[0]).astype(np.uint8), (size[1], 1))
        image.putalpha(Image.fromarray(fade))
    return image


def fill(root: Path, share: float) -> dict[str, list[Path]]:
    """Draw every kind into a folder of its own."""
    found: dict[str, list[Path]] = {}
    for kind, (count, size, extension, options) in KINDS.items():
        folder = root / kind
        folder.mkdir()
        found[kind] = [folder / f"{i:05d}.{extension}" for i in range(max(2, round(count * share)))]
        for i, path in enumerate(found[kind]):
            draw(size, i, kind == "transparent").save(path, **options)
            path.with_suffix(".txt").write_text(f"picture {i}, drawn", encoding="utf-8")
    return found


def scan(folder: Path, count: int) -> float:
    """Seconds that our scan takes."""
    start = time.perf_counter()
    report = survey(DatasetConfig(folder=str(folder)))
    seconds = time.perf_counter() - start
    assert len(report.samples) == count and not report.skipped
    return seconds


def decode(paths: list[Path]) -> float:
    """Seconds that Pillow takes to decode them on all cores."""

    def load(path: Path) -> None:
        with Image.open(path) as image:
            image.load()

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
        list(pool.map(load, paths))
    return time.perf_counter() - start


def measure(share: float, turns: int) -> dict[str, Any]:
    """The whole measurement, as described above."""
    with tempfile.TemporaryDirectory() as place:
        files = fill(Path(place), share)
        ours: dict[str, list[float]] = {kind: [] for kind in files}
        theirs: dict[str, list[float]] = {kind: [] for kind in files}
        for turn in range(turns + 1):
            for kind, paths in files.items():
                for first in (True, False):
                    if first == (turn % 2 == 0):
                        ours[kind].append(scan(Path(place) / kind, len(paths)))
                    else:
                        theirs[kind].append(decode(paths))
    kinds = {}
    for kind, paths in files.items():
        pairs = list(zip(ours[kind], theirs[kind], strict=True))[1:]  # the first turn warms up
        kinds[kind] = {
            "images": len(paths),
            "scan": round(len(paths) / statistics.median(a for a, _ in pairs), 1),
            "pillow": round(len(paths) / statistics.median(b for _, b in pairs), 1),
            "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        }
    usual = [kind for kind in files if kind != "small"]
    totals = [sum(theirs[k][t] for k in usual) / sum(ours[k][t] for k in usual) for t in range(1, turns + 1)]
    return {"cores": cores(), "turns": turns, "kinds": kinds, "ratio": round(statistics.median(totals), 3)}


def main() -> int:
    """Print the figures; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    parser.add_argument("--turns", type=int, default=5, help="how often each is measured")
    parser.add_argument("--share", type=float, default=1.0, help="so many times the usual number of pictures")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    result = measure(args.share, args.turns)
    if not args.json:
        for kind, row in result["kinds"].items():
            rates = f"{row['scan']:9.1f} images/s, Pillow {row['pillow']:9.1f}"
            sys.stdout.write(f"{kind:12} {rates}: {row['ratio']:.2f} x\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

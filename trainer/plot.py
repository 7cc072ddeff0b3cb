"""Pictures about a run: its loss curve, and sheets of labelled samples. Matplotlib and Pillow are loaded when used."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import files

if TYPE_CHECKING:
    from PIL import Image

Points = Sequence[tuple[int, float | None]]
"""(step, loss) in order of the steps; None where a loss was no number."""
FIXED = "loss at fixed noise and noise levels (comparable between steps)"


def smoothed(points: Points, share: float) -> list[tuple[int, float]]:
    """Exponential moving average that carries ``share`` (0..1) from step to step, unbiased at the start.

    Losses that are not finite are left out.
    """
    if not 0 <= share < 1:
        raise ValueError(f"smoothing is {share!r}: give a number from 0 to below 1")
    total = weight = 0.0
    result = []
    for step, loss in points:
        if loss is not None and math.isfinite(loss):
            total, weight = share * total + (1 - share) * loss, share * weight + (1 - share)
            result.append((step, total / weight))
    return result


def draw_losses(
    points: Points, *, smoothing: float = 0.9, evals: Points = (), title: str = "", size: tuple[int, int] = (1024, 576)
) -> Image.Image:
    """The loss of each step, its smoothed line, and the losses at fixed noise (``evals``), as an RGB picture.

    Raises ``ValueError`` if there is nothing to draw or matplotlib is missing.
    """
    try:
        from matplotlib import ticker
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"the loss plot needs matplotlib ({error}): pip install matplotlib") from error
    from PIL import Image

    raw, line, fixed = smoothed(points, 0), smoothed(points, smoothing), smoothed(evals, 0)
    if not raw and not fixed:
        raise ValueError("there are no losses to plot yet: train some steps first")
    # A figure of its own, not pyplot: that keeps global state, and other code in the process may use it.
    figure = Figure(figsize=(size[0] / 100, size[1] / 100), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if raw:
        dots = "." if len(raw) < 50 else ""
        axes.plot(*zip(*raw, strict=True), color="#9db4d6", linewidth=0.8, marker=dots, label="each step")
        axes.plot(*zip(*line, strict=True), color="#1f4e9e", linewidth=2, label=f"smoothed ({smoothing:g})")
    if fixed:
        # A line between two or three points looks like a course that the loss took.
        style = "o:" if len(fixed) >= 4 else "o"
        axes.plot(*zip(*fixed, strict=True), style, color="#c8501e", linewidth=1, label=FIXED)
    values = [loss for _, loss in (*raw, *fixed)]
    # The panel on Train Steps (web/losses.mjs) takes the same axis.
    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
        if max(values) < 1e4 * min(values):
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    canvas.draw()
    return Image.fromarray(_array(canvas)[..., :3].copy())


def _array(canvas):
    import numpy as np

    return np.asarray(canvas.buffer_rgba())


def sheet(pictures: Sequence[Image.Image], labels: Sequence[str], *, columns: int = 4, title: str = "",
          scale: int = 2) -> Image.Image:  # fmt: skip
    """Pictures of one size in a grid, each enlarged ``scale`` times with its label below."""
    from PIL import Image, ImageDraw, ImageFont

    assert len(pictures) == len(labels) and pictures
    font, margin, line = ImageFont.load_default(), 8, 16
    width, height = pictures[0].width * scale, pictures[0].height * scale
    rows, top = -(-len(pictures) // columns), margin + (line + margin if title else 0)
    size = (margin + columns * (width + margin), top + rows * (height + line + margin))
    result = Image.new("RGB", size, (238, 238, 238))
    pen = ImageDraw.Draw(result)
    if title:
        pen.text((margin, margin), title, fill="black", font=font)
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        x, y = margin + i % columns * (width + margin), top + i // columns * (height + line + margin)
        result.paste(picture.resize((width, height), Image.Resampling.NEAREST), (x, y))
        pen.text((x, y + height + 2), label, fill="black", font=font)
    return result


def save_png(image: Image.Image, path: str | os.PathLike[str]) -> Path:
    """Write a picture whole or not at all."""
    path = Path(path)
    part = path.with_name(f"{files.PART}{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(part, format="PNG")
        files.replace(part, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return path

"""Pictures as a person sees them: any common format to upright 8-bit sRGB."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

from ..config import DatasetConfig
from . import colour
from .crop import crop_box
from .decode import MAX_PIXELS, ImageProblem, frames, opened, orientation, turned
from .formats import OTHER_EXTENSIONS, RAW_EXTENSIONS, extensions, looks_like_picture, unconverted_colours

__all__ = [
    "MAX_PIXELS", "OTHER_EXTENSIONS", "RAW_EXTENSIONS", "Examined", "ImageProblem", "examine", "extensions",
    "fit", "load_fitted", "load_image", "loaded", "looks_like_picture", "mirrored", "same_pixels",
]  # fmt: skip

_DEFAULTS = DatasetConfig(folder=".")
_THUMBNAIL = (16, 16)


@dataclass(frozen=True)
class Examined:
    """What the scan learns of a picture by decoding it."""

    width: int
    height: int
    """Size in pixels, upright."""
    content_hash: str
    """sha256 of the file's bytes."""
    warnings: tuple[str, ...]
    has_alpha: bool
    """Whether some pixel is not opaque."""
    thumbnail: str
    """Equal for pictures of the same pixels in files of one kind; seldom for others. See ``same_pixels``."""
    mask_hash: str
    """sha256 of the mask's bytes; empty: it has none."""


def load_image(path: str | Path, background: str = "#ffffff", *, content_hash: str | None = None) -> Image.Image:
    """The picture as RGB, upright, in sRGB, transparency over ``background``, 16-bit and float values scaled.

    One of more than ``MAX_PIXELS`` comes at 1/2, 1/4 or 1/8 of its size, where its format allows that.
    ``content_hash``: raise if the file's bytes are no longer those. Raises ``ImageProblem`` (a ``ValueError``).
    """
    with loaded(path, content_hash) as (image, turn):
        return turned(colour.to_rgb(image, background), turn)


def load_fitted(
    path: str | Path, bucket: tuple[int, int], config: DatasetConfig = _DEFAULTS, *, content_hash: str | None = None
) -> np.ndarray:
    """``fit`` of ``load_image`` by a dataset's settings, while the memory of the whole picture is still reserved."""
    with loaded(path, content_hash) as (image, turn):
        return fit(turned(colour.to_rgb(image, config.background), turn), bucket, config.crop)


@contextlib.contextmanager
def loaded(path: str | Path, content_hash: str | None = None) -> Iterator[tuple[Image.Image, int]]:
    """A decoded picture as its file has it, and how it must be turned. Raises as ``load_image`` does.

    Its memory is reserved within: open no other picture there, which might wait for it.
    """
    with opened(path, hashed=content_hash is not None) as found:
        if content_hash is not None and found.content_hash != content_hash:
            raise ImageProblem(path, "changed while it was being read: scan the folder again")
        found.image.load()
        yield found.image, orientation(found.image)


def examine(path: str | Path, config: DatasetConfig = _DEFAULTS, mask: str | Path | None = None) -> Examined:
    """Decode a picture and its mask wholly, and tell its size, hash and oddities. Raises ``ImageProblem``."""
    found = _examine(path, config)
    if mask is None:
        return found
    name = os.path.basename(mask)
    try:
        other = _examine(mask, replace(config, animations="first frame"))
    except ImageProblem as problem:
        raise ImageProblem(path, f"has a mask, {name}, that {problem.reason}") from problem
    notes = [f"has a mask, {name}, that {what}" for what in other.warnings]
    sizes = f"is {found.width} x {found.height} px and its mask, {name}, {other.width} x {other.height}"
    # One pixel more or less is what rounding makes of a smaller copy.
    if abs(other.width * found.height - other.height * found.width) > max(found.width, found.height):
        notes.append(f"{sizes}: the mask is stretched over it")
    return replace(found, mask_hash=other.content_hash, warnings=found.warnings + tuple(notes))


def _examine(path: str | Path, config: DatasetConfig) -> Examined:
    with opened(path, hashed=True, glance=True) as found:
        image, notes = found.image, []
        if (count := frames(image)) > 1:
            what = f"has {count} {'pages' if image.format == 'TIFF' else 'frames'}"
            if config.animations == "skip":
                raise ImageProblem(path, f"{what}: animations are left out by choice")
            notes.append(f"{what}: only the first is trained")
        image.load()
        turn = orientation(image)
        # A TIFF may have turned as it was loaded, and a plugin may know better than its header.
        width, height = found.size if found.reduced > 1 else image.size
        if turn >= 5:
            width, height = height, width
        if width * height > MAX_PIXELS:
            notes.append(f"is {width} x {height} px: it is decoded at a smaller scale")
        if colours := unconverted_colours(found.head, image):
            notes.append(colours)
        small = colour.to_rgb(turned(image.resize(_THUMBNAIL, Image.Resampling.NEAREST), turn))
        thumbnail = hashlib.sha256(f"{width} {height}".encode("ascii") + small.tobytes()).hexdigest()[:16]
        transparent = colour.opacity(image) is not None
        return Examined(width, height, found.content_hash, tuple(notes), transparent, thumbnail, "")


def same_pixels(one: str | Path, other: str | Path) -> bool:
    """Whether two pictures look the same to the last pixel. Raises ``ImageProblem``."""
    first, second = load_image(one), load_image(other)
    return first.size == second.size and ImageChops.difference(first, second).getbbox() is None


def fit(image: Image.Image, bucket: tuple[int, int], crop: str = "centre") -> np.ndarray:
    """Resize an RGB picture with antialiasing to cover ``bucket`` (width, height), and crop it there.

    ``crop`` as in ``DatasetConfig``. Returns float32 [height, width, 3] in 0..1.
    """
    if image.size != bucket:
        image = image.resize(bucket, Image.Resampling.LANCZOS, box=crop_box(image, bucket, crop))
    return np.asarray(image, dtype=np.float32) / 255


def mirrored(pixels: np.ndarray) -> np.ndarray:
    """Left and right exchanged: of ``fit``'s [height, width, 3] or a mask's [h, w], before encoding."""
    return np.ascontiguousarray(pixels[:, ::-1])

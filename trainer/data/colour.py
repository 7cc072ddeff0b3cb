"""From any of Pillow's modes to 8-bit sRGB."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from typing import Any

import numpy as np
from PIL import Image

log = logging.getLogger(__name__)

_SPACES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK", "Lab ": "LAB"}
"""Colour spaces of ICC profiles -> the mode that a picture must have for the profile to be its own."""
_per_thread = threading.local()


def to_rgb(image: Image.Image, background: str = "#ffffff") -> Image.Image:
    """A loaded picture as RGB: deep values scaled to 8 bits, ICC profile converted to sRGB, transparency composited.

    ``background``: ``#rrggbb``, the sRGB colour behind transparent pixels. Raises ``ValueError`` for a mode that cannot
    be converted.
    """
    profile = image.info.get("icc_profile")
    image, alpha = _without_alpha(image)
    image = _managed(image, profile) if profile else _plain(image)
    if alpha is not None:
        image = Image.composite(image, Image.new("RGB", image.size, background), alpha)
    return image


def opacity(image: Image.Image) -> Image.Image | None:
    """How opaque each pixel of a loaded picture is (mode L, 255 opaque); None if all are."""
    return _without_alpha(image)[1]


def _without_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """The colours in an 8-bit mode without transparency, and the opacity (None: opaque all over)."""
    mode, key = image.mode, image.info.get("transparency")
    if mode in ("I", "F") or mode.startswith("I;"):
        return _eight_bits(image, key if isinstance(key, int) else None)
    if mode in ("La", "RGBa"):
        image = image.convert(mode.upper())
    elif mode in ("P", "PA") or (key is not None and mode in ("1", "L", "RGB")):
        image = image.convert("RGBA")
    if image.mode not in ("LA", "RGBA"):
        return image, None
    alpha = image.getchannel("A")
    opaque = image.convert(image.mode[:-1])  # drops the channel and leaves the colours below as they are
    return opaque, None if alpha.getextrema() == (255, 255) else alpha


def _eight_bits(image: Image.Image, key: int | None) -> tuple[Image.Image, Image.Image | None]:
    values = np.asarray(image)
    alpha = None if key is None else Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8))
    if image.mode == "F":
        values = np.nan_to_num(values.astype(np.float64), nan=0.0)
        low, high = float(values.min()), float(values.max())
        if low < 0 or high > 65535:
            top, values = high - low, values - low
        else:
            top = 1.0 if high <= 1 else 255.0 if high <= 255 else 65535.0
    else:
        values = values.astype(np.int64)
        if values.min() < 0:
            values &= 0xFFFFFFFF  # unsigned 32-bit files, which Pillow shows as signed
        top = 65535.0 if values.max() <= 65535 else float(0xFFFFFFFF)
        values = values.astype(np.float64)
    scaled = np.clip(values * (255 / (top or 1.0)) + 0.5, 0, 255)
    return Image.fromarray(scaled.astype(np.uint8)), alpha


def _plain(image: Image.Image) -> Image.Image:
    if image.mode == "LAB":
        from PIL import ImageCms

        lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
        return _apply(image, _transform(lab, "LAB"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _managed(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert by the embedded profile; one that is broken, or not for these colours, is left aside."""
    known: dict[tuple[bytes, str], Any] = _per_thread.__dict__.setdefault("transforms", {})
    image = image.convert("L") if image.mode == "1" else image
    key = (hashlib.sha256(profile).digest(), image.mode)
    if key not in known:
        if len(known) >= 64:
            known.clear()
        known[key] = _profile_transform(profile, image.mode)
    transform, mode = known[key]
    if transform is None:
        return _plain(image)
    return _apply(image if image.mode == mode else image.convert(mode), transform)


def _profile_transform(data: bytes, mode: str) -> tuple[Any, str]:
    try:
        from PIL import ImageCms

        profile: Any = ImageCms.ImageCmsProfile(io.BytesIO(data))
        wanted = _SPACES.get(profile.profile.xcolor_space)
        if wanted != mode and not (wanted == "RGB" and mode == "L"):
            return None, mode
        transform = _transform(profile, wanted or mode)
        return (None if _changes_nothing(transform, wanted or mode) else transform), wanted or mode
    except Exception as error:  # littlecms raises its own kinds; a Pillow without it cannot import it
        log.debug("ICC profile left aside: %s", error)
        return None, mode


def _transform(profile: Any, mode: str) -> Any:
    from PIL import ImageCms

    return ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB")


def _changes_nothing(transform: Any, mode: str) -> bool:
    """Whether a profile is sRGB under whatever name: then the pixels stay exactly as they are."""
    if mode not in ("RGB", "L"):
        return False
    steps = np.arange(0, 256, 17, dtype=np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(64, 64, 3) if mode == "RGB" else steps[None]
    source = Image.fromarray(np.ascontiguousarray(grid))
    moved = np.asarray(_apply(source, transform)).astype(int) - np.asarray(source.convert("RGB")).astype(int)
    return int(np.abs(moved).max()) <= 1


def _apply(image: Image.Image, transform: Any) -> Image.Image:
    from PIL import ImageCms

    result = ImageCms.applyTransform(image, transform)
    assert result is not None
    return result

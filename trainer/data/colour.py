"""From any of Pillow's modes to 8-bit sRGB."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

log = logging.getLogger(__name__)

_SPACES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK", "Lab ": "LAB"}
"""Colour spaces of ICC profiles -> the mode that a picture must have for the profile to be its own."""
_NO_OPTIMIZATION, _FINE_GRID = 0x0100, 0x0400
"""littlecms' flags, as numbers: their names in Pillow have changed."""
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
"""TIFF's tags."""
_STRIP = 1 << 22
"""Pixels that are converted at a time."""
_per_thread = threading.local()


def to_rgb(image: Image.Image, background: str = "#ffffff") -> Image.Image:
    """A loaded picture as RGB: deep values scaled to 8 bits, ICC profile converted to sRGB, transparency composited.

    ``background``: ``#rrggbb``, the sRGB colour behind transparent pixels. Raises ``ValueError`` for a mode that cannot
    be converted.
    """
    if image.mode == "RGB" and not image.info.get("icc_profile") and image.info.get("transparency") is None:
        return image
    levels = _levels(image) if _is_deep(image) else None
    strips = list(_strips(image))
    if len(strips) == 1:
        return _converted(image, background, levels)
    result = Image.new("RGB", image.size)
    for box in strips:
        result.paste(_converted(image.crop(box), background, levels), box)
    return result


def opacity(image: Image.Image) -> Image.Image | None:
    """How opaque each pixel of a loaded picture is (mode L, 255 opaque); None if all are."""
    mode, key = image.mode, image.info.get("transparency")
    if _is_deep(image):
        if not isinstance(key, int):
            return None
        alpha = Image.fromarray(np.where(np.asarray(image) == key, 0, 255).astype(np.uint8))
    elif mode in ("LA", "La", "RGBA", "RGBa"):
        alpha = image.getchannel(len(mode) - 1)
    elif mode == "PA" or key is not None or (image.palette is not None and image.palette.mode == "RGBA"):
        if mode not in ("P", "PA", "1", "L", "RGB"):
            return None
        alpha = image.convert("RGBA").getchannel("A")
    else:
        return None
    return None if alpha.getextrema() == (255, 255) else alpha


def _strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """The picture in boxes of whole rows: what is made of a large one on the way takes little memory then."""
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        yield 0, top, image.width, min(image.height, top + rows)


def _converted(image: Image.Image, background: str, levels: tuple[float, float] | None) -> Image.Image:
    alpha, profile = opacity(image), image.info.get("icc_profile")
    if levels is not None:
        plain = _from_deep(image, *levels, profile)
    else:
        plain = _opaque(image)
        plain = _managed(plain, profile) if profile else _plain(plain)
    if alpha is not None:
        plain = Image.composite(plain, Image.new("RGB", image.size, background), alpha)
    return plain


def _opaque(image: Image.Image) -> Image.Image:
    """The colours in an 8-bit mode without transparency."""
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    elif image.mode in ("P", "PA") or (image.info.get("transparency") is not None and image.mode in ("1", "L", "RGB")):
        image = image.convert("RGBA")
    # Dropping the channel leaves the colours below as they are.
    return image.convert(image.mode[:-1]) if image.mode in ("LA", "RGBA") else image


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;")


def _levels(image: Image.Image) -> tuple[float, float]:
    """The values of black and of white in a picture of 16 or 32 bits or of floating point."""
    low, high = _extremes(image)
    tags: Any = getattr(image, "tag_v2", {})
    if image.mode == "F":
        black, white = 0.0, 1.0 if high <= 1 else 255.0 if high <= 255 else 65535.0
        if low < 0 or high > 65535:
            black, white = low, high
    elif low < 0 and 2 in tags.get(_SAMPLE_FORMAT, ()):
        black, white = low, high
    elif tags.get(_BITS) == (12,):
        black, white = 0.0, 4095.0
    else:
        black, white = 0.0, 65535.0 if low >= 0 and high <= 65535 else float(0xFFFFFFFF)
    return (white, black) if tags.get(_PHOTOMETRIC) == 0 else (black, white)  # 0: white is zero


def _extremes(image: Image.Image) -> tuple[float, float]:
    lows, highs = [], []
    for box in _strips(image):
        values = np.asarray(image.crop(box))
        values = values[np.isfinite(values)]
        if values.size:
            lows.append(float(values.min()))
            highs.append(float(values.max()))
    return min(lows, default=0.0), max(highs, default=0.0)


def _from_deep(image: Image.Image, black: float, white: float, profile: bytes | None) -> Image.Image:
    values = np.asarray(image)
    if image.mode == "I" and max(black, white) > 0x7FFFFFFF:
        values = values.view(np.uint32)  # unsigned files, which Pillow shows as signed
    low, high = min(black, white), max(black, white)
    finite = np.nan_to_num(values.astype(np.float64), nan=black, posinf=high, neginf=low)
    scaled = (finite - black) * (255 / ((white - black) or 1.0))
    manage = _manager(profile, "L") if profile else None
    if manage is None:
        return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8)).convert("RGB")
    # Between the answers for 8 bits: rounded to 8 bits first, a linear profile would leave steps in the shadows.
    answers = np.asarray(manage(_ramp()))[0]
    channels = [np.interp(scaled, np.arange(256), answers[:, c]) for c in range(3)]
    return Image.fromarray((np.stack(channels, -1) + 0.5).astype(np.uint8))


def _plain(image: Image.Image) -> Image.Image:
    if image.mode == "LAB":
        from PIL import ImageCms

        lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
        return _apply(image, _transform(lab, "LAB"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _managed(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert by the embedded profile; one that is broken, or not for these colours, is left aside."""
    image = image.convert("L") if image.mode == "1" else image
    manage = _manager(profile, image.mode)
    return _plain(image) if manage is None else manage(image)


_Manager = Callable[[Image.Image], Image.Image]


def _manager(profile: bytes, mode: str) -> _Manager | None:
    """What makes sRGB of a mode's pictures by a profile; None: nothing is to be done."""
    known: dict[tuple[bytes, str], _Manager | None] = _per_thread.__dict__.setdefault("managers", {})
    key = (hashlib.sha256(profile).digest(), mode)
    if key not in known:
        if len(known) >= 64:
            known.clear()
        try:
            known[key] = _new_manager(profile, mode)
        except Exception as error:  # littlecms raises its own kinds; a Pillow without it cannot import it
            log.debug("ICC profile left aside: %s", error)
            known[key] = None
    return known[key]


def _new_manager(data: bytes, mode: str) -> _Manager | None:
    from PIL import ImageCms

    profile: Any = ImageCms.ImageCmsProfile(io.BytesIO(data))
    space = _SPACES.get(profile.profile.xcolor_space)
    if space is None or (space != mode and not (space == "RGB" and mode == "L")):
        return None
    transform = _transform(profile, space)
    if mode == "L":  # 256 answers are all there are
        answers = np.asarray(_apply(_ramp().convert(space), transform))[0].astype(int)
        if np.abs(answers - np.arange(256)[:, None]).max() <= 1:
            return None
        tables = [answers[:, c].tolist() for c in range(3)]
        return lambda image: Image.merge("RGB", [image.point(table) for table in tables])
    if mode == "RGB" and _changes_nothing(transform):
        return None
    return lambda image: _apply(image, transform)


def _transform(profile: Any, mode: str) -> Any:
    from PIL import ImageCms

    # littlecms replaces a chain by a coarse grid unless told otherwise, which is wrong in the shadows of linear greys.
    flags: Any = _NO_OPTIMIZATION if mode == "L" else _FINE_GRID
    return ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB", flags=flags)


def _ramp() -> Image.Image:
    return Image.fromarray(np.arange(256, dtype=np.uint8)[None])


def _changes_nothing(transform: Any) -> bool:
    """Whether an RGB profile is sRGB under whatever name: then the pixels stay exactly as they are."""
    steps = np.arange(0, 256, 17, dtype=np.uint8)
    grid = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(64, 64, 3)
    moved = np.asarray(_apply(Image.fromarray(grid), transform)).astype(int) - grid
    return int(np.abs(moved).max()) <= 1


def _apply(image: Image.Image, transform: Any) -> Image.Image:
    from PIL import ImageCms

    result = ImageCms.applyTransform(image, transform)
    assert result is not None
    return result

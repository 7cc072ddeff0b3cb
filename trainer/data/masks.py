"""Masks of the loss: pictures beside pictures, and transparency. White, or opaque, is trained."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePath

import numpy as np
from PIL import Image

from ..config import DatasetConfig
from . import colour, images
from .crop import crop_box
from .decode import turned

FOLDER = "masks"
_ENDINGS = (".mask", "-masklabel")
"""Before the extension of a mask beside its picture; the second is OneTrainer's."""


def is_mask(relative: str) -> bool:
    """Whether a picture of this path in a dataset folder is a mask by its name: it is never trained as a picture.

    Masks are ``name.mask.png`` beside a picture (or ``name-masklabel.png``), and all in folders called ``masks``.
    """
    # Without pathlib, which would take as long as all else that is asked of a small picture's name.
    head, name = os.path.split(relative)
    return os.path.splitext(name)[0].lower().endswith(_ENDINGS) or FOLDER in head.lower().split(os.sep)


def pair(pictures: Iterable[str], masks: Iterable[str]) -> dict[str, str]:
    """Which mask is which picture's: picture -> mask, both as relative paths. No file is read.

    A mask is called like its picture, with or without the picture's extension, whatever its own; ``sub/name.png`` has
    it beside itself, in ``sub/masks`` or in ``masks/sub``. A mask that is no value here has no picture.
    """
    by_key: dict[tuple[str, str], str] = {}
    for mask in sorted(masks, reverse=True):  # of several for one picture, the first by name
        path = PurePath(mask)
        stem = path.stem
        for ending in _ENDINGS:
            if stem.lower().endswith(ending):
                stem = stem[: -len(ending)]
        folder = PurePath(*(part for part in path.parts[:-1] if part.lower() != FOLDER))
        by_key[str(folder), stem] = mask
    found = {}
    for picture in pictures:
        path = PurePath(picture)
        mask = by_key.get((str(path.parent), path.name)) or by_key.get((str(path.parent), path.stem))
        if mask is not None:
            found[picture] = mask
    return found


def latent_mask(path: str | Path, bucket: tuple[int, int], config: DatasetConfig, mask: str | Path | None = None,
                *, content_hash: str | None = None, mask_hash: str | None = None) -> np.ndarray:  # fmt: skip
    """How much each latent pixel of a picture is trained: float32 [height / 8, width / 8] of ``bucket`` in 0..1.

    The product of its mask's brightness and, where ``config.alpha`` is ``mask``, its opacity, averaged over 8 x 8
    pixels of the crop that ``images.fit`` takes. ``outside_mask`` is not in it. A mask of another size is stretched
    over the picture. ``content_hash`` and ``mask_hash``: raise if the files' bytes are no longer those. Raises
    ``ImageProblem``.
    """
    size = bucket[0] // 8, bucket[1] // 8
    weight = np.ones(size[::-1], dtype=np.float32)
    with images.loaded(path, content_hash) as (image, turn):
        picture = turned(colour.to_rgb(image, config.background), turn)
        left, top, right, bottom = crop_box(picture, bucket, config.crop)
        part = left / picture.width, top / picture.height, right / picture.width, bottom / picture.height
        opacity = colour.opacity(image) if config.alpha == "mask" else None
        if opacity is not None:
            weight *= _averaged(turned(opacity, turn), part, size)
    if mask is not None and config.masks:
        with images.loaded(mask, mask_hash) as (image, turn):
            weight *= _averaged(turned(colour.to_rgb(image, "#000000").convert("L"), turn), part, size)
    return weight


def _averaged(layer: Image.Image, part: tuple[float, float, float, float], size: tuple[int, int]) -> np.ndarray:
    """A part (in shares of the whole) of a grey picture, averaged to ``size``: float32 [height, width] in 0..1."""
    width, height = layer.size
    box = part[0] * width, part[1] * height, min(part[2] * width, width), min(part[3] * height, height)
    return np.asarray(layer.resize(size, Image.Resampling.BOX, box=box), dtype=np.float32) / 255

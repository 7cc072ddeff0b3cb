"""The settings of a dataset: a folder of pictures with captions, and others that are trained with it.

A part of ``config.py``, which gives all of this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .settings import number, one_of, require, whole

CROPS = ("centre", "top", "focus")
ALPHAS = ("background", "mask")
ANIMATIONS = ("first frame", "skip")
CAPTION_LINES = ("join", "random")
MISSING_CAPTIONS = ("trigger or name", "fixed", "folder", "skip", "stop")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A folder of pictures with captions beside them, and others that are trained with it."""

    folder: str
    """Path of the folder; sub-folders are read too."""
    resolution: int = 1024
    """Side in pixels of the square whose area every bucket matches."""
    more_resolutions: tuple[int, ...] = ()
    """Further such sides: every picture is trained at each of them as well."""
    bucket_step: int = 64
    """Bucket sides are multiples of this many pixels (itself a multiple of 16)."""
    upscale: bool = True
    """Whether pictures smaller than their bucket are enlarged; if not, they get a smaller bucket."""
    crop: str = "centre"
    """What is kept where a picture is cropped to its bucket: the ``centre``, the ``top`` (of an upright picture; the
    centre of a wide one) or the ``focus``, the part with the most detail."""
    flip: bool = False
    """Whether every picture is trained mirrored (left and right) half of the time."""
    alpha: str = "background"
    """Transparent pixels: ``background`` lays them on that colour; ``mask`` leaves them out of the loss as well."""
    background: str = "#ffffff"
    """Colour behind transparent pixels, ``#rrggbb``."""
    animations: str = "first frame"
    """Animated pictures: their ``first frame`` (with a warning), or ``skip``."""
    masks: bool = True
    """Whether ``name.mask.png`` and ``masks/name.png`` are taken as masks of the loss: white is trained."""
    outside_mask: float = 0.0
    """Weight of the loss where a mask is black, against 1 where it is white."""
    trigger_word: str = ""
    """The caption of pictures that have none; empty: the words of the file name."""
    fixed_caption: str = ""
    """With text: the one caption of all pictures, whatever lies beside them. Under ``missing_captions`` ``fixed``:
    the caption of those that have none."""
    missing_captions: str = "trigger or name"
    """Pictures without a caption: ``trigger or name``, ``fixed`` (that caption), ``folder`` (their folder's name),
    ``skip``, or ``stop`` with an error."""
    caption_prefix: str = ""
    """Put before every caption."""
    caption_suffix: str = ""
    """Put behind every caption."""
    caption_lines: str = "join"
    """A caption file's lines: ``join`` makes one caption of them, ``random`` trains one of them at a time."""
    shuffle_tags: bool = False
    """Whether the tags (parts between commas) are trained in changing orders."""
    keep_tags: int = 0
    """So many tags at the front stay where they are under ``shuffle_tags`` and ``tag_dropout``."""
    tag_dropout: float = 0.0
    """Share of the other tags that is left out at a time."""
    caption_variants: int = 4
    """How many versions of each caption are encoded where tags are shuffled or left out."""
    repeats: int = 1
    """How often each picture is seen in an epoch."""
    weight: float = 1.0
    """Factor of the loss of these pictures."""
    validation_share: float = 0.0
    """Share of the pictures that is never trained but measured."""
    validation_folder: str = ""
    """Path of a folder of pictures to measure instead; empty: none."""
    also: tuple[DatasetConfig, ...] = ()
    """Further folders, each with settings of its own."""

    def __post_init__(self) -> None:
        require(bool(self.folder.strip()), "dataset folder is empty: give the path of a folder of pictures")
        whole("bucket_step", self.bucket_step, 16, 512)
        require(self.bucket_step % 16 == 0, f"bucket_step is {self.bucket_step}: give a multiple of 16")
        object.__setattr__(self, "more_resolutions", tuple(self.more_resolutions))
        for name, side in (("resolution", self.resolution), *(("more_resolutions", r) for r in self.more_resolutions)):
            whole(name, side, 16, 8192)
            require(side >= self.bucket_step, f"{name} is {side}: give at least bucket_step, {self.bucket_step}")
        one_of("crop", self.crop, CROPS)
        one_of("alpha", self.alpha, ALPHAS)
        require(
            re.fullmatch("#[0-9a-fA-F]{6}", self.background) is not None,
            f"background is {self.background!r}: give a colour as #rrggbb, such as #ffffff",
        )
        one_of("animations", self.animations, ANIMATIONS)
        number("outside_mask", self.outside_mask, 0.0, 1.0)
        one_of("missing_captions", self.missing_captions, MISSING_CAPTIONS)
        require(
            self.missing_captions != "fixed" or bool(self.fixed_caption.strip()),
            "fixed_caption is empty: write the caption that missing_captions 'fixed' asks for",
        )
        one_of("caption_lines", self.caption_lines, CAPTION_LINES)
        whole("keep_tags", self.keep_tags, 0, 1000)
        number("tag_dropout", self.tag_dropout, 0.0, 1.0)
        whole("caption_variants", self.caption_variants, 1, 100)
        whole("repeats", self.repeats, 1, 10_000)
        number("weight", self.weight, 0.0, 100.0, above=True)
        number("validation_share", self.validation_share, 0.0, 0.5)
        object.__setattr__(self, "also", tuple(self.also))

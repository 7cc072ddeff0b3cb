"""Pictures as a person sees them: any common format to upright 8-bit sRGB.

Nothing is taken on trust from a file's name, and no global setting of Pillow is left changed: the process may be
shared with other people's code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageChops, ImageFile, UnidentifiedImageError

from ..config import DatasetConfig
from . import colour
from .crop import crop_box
from .paths import long_path

MAX_PIXELS = 178_956_970
"""Larger pictures are refused as decompression bombs (twice Pillow's warning limit, 0.7 GB of RGBA)."""
_PIXELS_AT_ONCE = 2 * MAX_PIXELS
_NOT_PICTURES = {"BUFR", "EPS", "FITS", "GRIB", "HDF5", "IPTC", "MCIDAS", "MPEG", "PDF", "PCD", "SPIDER", "WMF"}
"""Formats that Pillow only stubs, that need other programs, or that match data that is no picture."""
RAW_EXTENSIONS = frozenset((
    ".3fr", ".arw", ".bay", ".cr2", ".cr3", ".crw", ".dcr", ".dcs", ".dng", ".drf", ".erf", ".fff", ".gpr", ".iiq",
    ".k25", ".kdc", ".mef", ".mos", ".mrw", ".nef", ".nrw", ".orf", ".pef", ".ptx", ".raf", ".raw", ".rw2", ".rwl",
    ".sr2", ".srf", ".srw", ".x3f",
))  # fmt: skip
OTHER_EXTENSIONS = frozenset((".ai", ".emf", ".eps", ".exr", ".hdr", ".kra", ".psb", ".svg", ".svgz", ".wmf", ".xcf"))
"""Pictures to their owner, but not read here."""
_REDUCIBLE = ("JPEG", "MPO")
_PLUGINS = {
    ".avif": ("AVIF", "pillow_avif", "pillow-avif-plugin"),
    ".heic": ("HEIF", "pillow_heif", "pillow-heif"),
    ".heif": ("HEIF", "pillow_heif", "pillow-heif"),
    ".jxl": ("JXL", "pillow_jxl", "pillow-jxl-plugin"),
}
"""Extension -> format, and the optional module and package that read it where Pillow does not."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


_DEFAULTS = DatasetConfig(folder=".")
_Out = TypeVar("_Out")
_MARKS = (
    b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"8BPS\0\1", b"qoif", b"DDS |",
    b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n", b"\0\0\0\x0cJXL \r\n",
)  # fmt: skip


class ImageProblem(ValueError):
    """A picture that cannot be used. ``reason`` is the message without the path."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


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
    """Equal for pictures of the same pixels in whatever lossless file; seldom for others. See ``same_pixels``."""
    mask_hash: str
    """sha256 of the mask's bytes; empty: it has none."""


def load_image(path: str | Path, background: str = "#ffffff", *, content_hash: str | None = None) -> Image.Image:
    """The picture as RGB, upright, in sRGB, transparency over ``background``, 16-bit and float values scaled.

    ``content_hash``: raise if the file's bytes are no longer those. Raises ``ImageProblem`` (a ``ValueError``).
    """
    return _load(path, content_hash, lambda image: colour.to_rgb(image, background))


def load_opacity(path: str | Path, *, content_hash: str | None = None) -> Image.Image | None:
    """The opacity of an upright picture (mode L, 255 opaque), or None if it is opaque all over."""
    return _load(path, content_hash, colour.opacity)


def _load(path: str | Path, content_hash: str | None, convert: Callable[[Image.Image], _Out]) -> _Out:
    with _opened(path) as image:
        if content_hash is not None and file_hash(path) != content_hash:
            raise ImageProblem(path, "changed while it was being read: scan the folder again")
        image.load()
        return convert(_upright(image))


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
    if abs(other.width * found.height - found.width * other.height) > max(other.width, other.height, found.width,
                                                                          found.height):  # fmt: skip
        notes.append(f"is {found.width} x {found.height} px and its mask, {name}, {other.width} x {other.height}:"
                     " the mask is stretched over it")  # fmt: skip
    return replace(found, mask_hash=other.content_hash, warnings=found.warnings + tuple(notes))


def _examine(path: str | Path, config: DatasetConfig) -> Examined:
    with _opened(path, reduced=True) as image:
        size, notes = image.size, []
        if (frames := _frames(image)) > 1:
            if config.animations == "skip":
                raise ImageProblem(path, f"has {frames} frames: animations are left out by choice")
            notes.append(f"has {frames} frames: only the first is trained")
        reduced = image.format in _REDUCIBLE
        if reduced:
            image.draft(None, (1, 1))  # 1/8 of the size in a third of the time: every byte is still read
        image.load()
        turned = _upright(image)
        if not reduced:
            size = turned.size
        elif _orientation(image) >= 5:
            size = size[1], size[0]
        opacity = colour.opacity(turned)
        small = colour.to_rgb(turned).resize((16, 16), Image.Resampling.NEAREST)
        thumbnail = hashlib.sha256(str(size).encode("ascii") + small.tobytes()).hexdigest()[:16]
        return Examined(size[0], size[1], file_hash(path), tuple(notes), opacity is not None, thumbnail, "")


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


def file_hash(path: str | Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(long_path(path), "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@functools.cache
def extensions() -> frozenset[str]:
    """Lower-case extensions of the pictures that this Pillow opens, or would with a plugin."""
    _formats()
    known = {e for e, name in Image.registered_extensions().items() if name not in _NOT_PICTURES}
    return frozenset(known | set(_PLUGINS) | {".jfif"}) - OTHER_EXTENSIONS


def looks_like_picture(head: bytes) -> bool:
    """Whether a file's first 32 bytes are those of a picture format with an unmistakable mark."""
    if head.startswith(_MARKS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    if head[4:8] == b"ftyp":
        return head[8:12] in (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1")
    # "BM" may begin a text: a bitmap has zeros and the length of its header behind it.
    return head[:2] == b"BM" and head[6:10] == b"\0\0\0\0" and head[14:18] in (b"(\0\0\0", b"l\0\0\0", b"|\0\0\0")


@contextlib.contextmanager
def _opened(path: str | Path, reduced: bool = False) -> Iterator[Image.Image]:
    """The file opened by Pillow, its size checked; errors inside become ``ImageProblem``."""
    extension = os.path.splitext(path)[1].lower()
    try:
        if extension in RAW_EXTENSIONS:
            raise ImageProblem(path, "is a camera RAW: develop it and save it as PNG or JPEG")
        if extension in OTHER_EXTENSIONS:
            raise ImageProblem(path, f"is of a kind that is not read ({extension}): save it as PNG")
        with _strictly(), Image.open(long_path(path), formats=_formats()) as image:
            if _is_raw(image, path):
                raise ImageProblem(path, "is a camera RAW, whatever its name: develop it and save it as PNG or JPEG")
            width, height = image.size
            if width < 1 or height < 1:
                raise ImageProblem(path, f"is {width} x {height} px")
            if width * height > MAX_PIXELS:
                raise ImageProblem(path, _bomb(f"{width} x {height} px"))
            cost = width * height
            if reduced and image.format in _REDUCIBLE:
                cost //= 64
            with _BUDGET.take(cost):
                yield image
    except ImageProblem:
        raise
    except Image.DecompressionBombError as error:
        raise ImageProblem(path, _bomb("a size beyond any picture's")) from error
    except UnidentifiedImageError as error:
        raise ImageProblem(path, _unknown(path, extension)) from error
    except FileNotFoundError as error:
        raise ImageProblem(path, "is gone (or a link to nothing)") from error
    except MemoryError as error:
        raise ImageProblem(path, "does not fit into memory: make it smaller") from error
    except Exception as error:  # Pillow's parsers raise anything at damaged files
        what = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
        raise ImageProblem(path, f"cannot be decoded ({what[:200]})") from error


def _bomb(size: str) -> str:
    return f"claims {size}, more than {MAX_PIXELS // 1_000_000} megapixels (a decompression bomb?): make it smaller"


def _unknown(path: str | Path, extension: str) -> str:
    if os.path.getsize(long_path(path)) == 0:
        return "is an empty file"
    if extension in _PLUGINS and _PLUGINS[extension][0] not in Image.OPEN:
        return f"needs a plugin to be read: pip install {_PLUGINS[extension][2]}"
    return "is no picture that can be read, though its name says so: remove it or save it as PNG"


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(0x0112, 1)
        return value if value in _TURNS else 1
    except Exception:  # EXIF data is often damaged; the picture is not
        return 1


def _frames(image: Image.Image) -> int:
    """Frames of an animation, pages of a TIFF; the further pictures of a phone photo and layers are none."""
    if image.format in ("MPO", "PSD"):
        return 1
    try:
        return getattr(image, "n_frames", 1) if getattr(image, "is_animated", False) else 1
    except Exception:  # damage behind the first frame
        return 1


def _upright(image: Image.Image) -> Image.Image:
    # Asked for after load(): Pillow turns TIFFs itself then, and clears the tag.
    turn = _TURNS.get(_orientation(image))
    if turn is None:
        return image
    info = image.info
    image = image.transpose(turn)
    image.info = info
    return image


def _is_raw(image: Image.Image, path: str | Path) -> bool:
    """DNG, or a reduced preview with the real picture in sub-directories (NEF and its like), or Canon's mark."""
    tags: Any = getattr(image, "tag_v2", None)
    if image.format != "TIFF" or tags is None:
        return False
    with open(long_path(path), "rb") as f:
        canon = f.read(10)[8:] == b"CR"
    return canon or 50706 in tags or (tags.get(254) == 1 and 330 in tags)


_lock = threading.Lock()
_known_formats: list[str] = []


def _formats() -> list[str]:
    """The formats to try, once all plugins that are installed are registered."""
    with _lock:
        if not _known_formats:
            Image.init()
            for name, module, _ in sorted(set(_PLUGINS.values())):
                if name in Image.OPEN:
                    continue
                with contextlib.suppress(Exception):
                    plugin = importlib.import_module(module)
                    if hasattr(plugin, "register_heif_opener"):
                        plugin.register_heif_opener()
            _known_formats.extend(f for f in Image.OPEN if f not in _NOT_PICTURES)
        return _known_formats


class _Budget:
    """Bounds the pixels that are decoded at once, over all threads: memory stays bounded whatever the pictures."""

    def __init__(self, total: int) -> None:
        self._free, self._total, self._turn = total, total, threading.Condition()

    @contextlib.contextmanager
    def take(self, amount: int) -> Iterator[None]:
        amount = min(amount, self._total)
        with self._turn:
            self._turn.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._turn:
                self._free += amount
                self._turn.notify_all()


_BUDGET = _Budget(_PIXELS_AT_ONCE)
_strict_users = 0
_strict_before = False


@contextlib.contextmanager
def _strictly() -> Iterator[None]:
    """Other code in the process may have told Pillow to accept truncated files: not while we look for them."""
    global _strict_users, _strict_before
    with _lock:
        if _strict_users == 0:
            _strict_before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        _strict_users += 1
    try:
        yield
    finally:
        with _lock:
            _strict_users -= 1
            if _strict_users == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = _strict_before


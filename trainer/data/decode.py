"""Opening pictures of whatever origin: sizes checked first, memory bounded, every fault a reason.

Nothing is taken on trust from a file's name, and no global setting of Pillow is left changed: the process may be
shared with other people's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageFile, UnidentifiedImageError

from . import formats
from .paths import long_path

MAX_PIXELS = 178_956_970
"""No more are decoded of one picture (twice Pillow's warning limit, 0.7 GB): larger ones are reduced by their decoder
(JPEG, JPEG 2000) or refused as decompression bombs."""
_REDUCED = 1 << 26
"""Where pictures are reduced, then to at most so many pixels: the largest resolution that is trained, squared."""
_AT_ONCE = 2 * MAX_PIXELS
"""Pixels of 4 bytes that are decoded at once, over all threads."""
_COSTS = {"JPEG2000": 5, "WEBP": 3, "AVIF": 3, "HEIF": 3, "JXL": 3}
"""Format -> how many times 4 bytes its decoder takes for a pixel; others take no more than the picture itself."""
_IN_MEMORY = 16 << 20
"""Files up to this many bytes are read once, to be hashed and decoded."""
_HEAD = 1 << 20
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


class ImageProblem(ValueError):
    """A picture that cannot be used. ``reason`` is the message without the path."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Opened:
    """A picture that is ready to be loaded."""

    image: Image.Image
    size: tuple[int, int]
    """Width and height as stored, before any reduction."""
    reduced: int
    """By how much its decoder makes it smaller: 1, 2, 4 or 8 (JPEG 2000: any power of 2)."""
    content_hash: str
    """sha256 of the file's bytes; empty where it was not asked for."""
    head: bytes
    """The file's bytes, or the first megabyte of a large one."""


@contextlib.contextmanager
def opened(path: str | Path, *, hashed: bool, glance: bool = False) -> Iterator[Opened]:
    """A file opened by Pillow, its size checked and its memory reserved; errors inside become ``ImageProblem``.

    ``glance``: small pixels will do; every byte of the file is read nevertheless.
    """
    extension = os.path.splitext(path)[1].lower()
    try:
        if extension in formats.RAW_EXTENSIONS:
            raise ImageProblem(path, "is a camera RAW: develop it and save it as PNG or JPEG")
        if extension in formats.OTHER_EXTENSIONS:
            raise ImageProblem(path, f"is of a kind that is not read ({extension}): save it as PNG")
        source, head, digest = _read(path, hashed)
        with _strictly(), contextlib.ExitStack() as stack:
            known, ahead = formats.known_formats(), formats.jxl_size(head)
            if ahead is None and "JXL" in known and formats.jxl_codestream(head) is not None:
                raise ImageProblem(path, "is a JPEG XL whose size is not found: it is damaged, or no picture")
            if ahead is not None:
                stack.enter_context(_BUDGET.take(_checked(path, ahead) * _COSTS["JXL"]))
            try:
                image = stack.enter_context(_opened_by_pillow(source, head))
            except UnidentifiedImageError as error:
                raise ImageProblem(path, _unknown(head, extension)) from error
            if formats.is_raw(head, image):
                raise ImageProblem(path, "is a camera RAW, whatever its name: develop it and save it as PNG or JPEG")
            size = image.size
            scale, cost = _scale(path, image, glance)
            if ahead is None:
                stack.enter_context(_BUDGET.take(cost))
            _reduce(image, scale)
            yield Opened(image, size, scale, digest, head)
    except ImageProblem:
        raise
    except Image.DecompressionBombError as error:
        raise ImageProblem(path, _bomb("a size beyond any picture's")) from error
    except FileNotFoundError as error:
        raise ImageProblem(path, "is gone (or a link to nothing)") from error
    except MemoryError as error:
        raise ImageProblem(path, "does not fit into memory: make it smaller") from error
    except Exception as error:  # Pillow's parsers raise anything at damaged files
        if isinstance(error, OSError) and error.strerror:
            raise ImageProblem(path, f"cannot be read ({error.strerror})") from error
        what = " ".join(str(error).split()) or type(error).__name__
        raise ImageProblem(path, f"cannot be decoded ({what[:200]}): it is damaged, or cut short") from error


def file_hash(path: str | Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(long_path(path), "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def orientation(image: Image.Image) -> int:
    """How a picture must be turned to be upright: EXIF's 1 to 8. TIFFs turn as they load: ask after that."""
    if image.format == "JXL" and not getattr(image, "jpeg", False):
        return 1  # its own field was heeded by the decoder, and EXIF's has to be ignored (ISO 18181-2)
    try:
        value = image.getexif().get(0x0112, 1)
        return value if value in _TURNS else 1
    except Exception:  # EXIF data is often damaged; the picture is not
        return 1


def turned(image: Image.Image, how: int) -> Image.Image:
    """A picture turned by ``orientation``'s answer."""
    if how == 1:
        return image
    info = image.info
    image = image.transpose(_TURNS[how])
    image.info = info
    return image


def frames(image: Image.Image) -> int:
    """Frames of an animation, pages of a TIFF; the further pictures of a phone photo and layers are none."""
    if image.format in ("MPO", "PSD", "HEIF"):
        return 1
    try:
        return getattr(image, "n_frames", 1) if getattr(image, "is_animated", False) else 1
    except Exception:  # damage behind the first frame
        return 1


def _read(path: str | Path, hashed: bool) -> tuple[Any, bytes, str]:
    """What Pillow is to open, its first bytes, and the hash."""
    place = long_path(path)
    # Asked before opening: to open a pipe is to wait for its writer, and so it is with some of the system's own files.
    info = os.stat(place)
    if not stat.S_ISREG(info.st_mode):
        raise ImageProblem(path, "is a folder or a device, not a file of a picture")
    if info.st_size == 0:
        raise ImageProblem(path, "is an empty file")
    whole = info.st_size <= _IN_MEMORY
    with open(place, "rb") as f:
        data = f.read(info.st_size if whole else _HEAD)
    if not whole:
        return place, data, file_hash(path) if hashed else ""
    return io.BytesIO(data), data, hashlib.sha256(data).hexdigest() if hashed else ""


def _opened_by_pillow(source: Any, head: bytes) -> Image.Image:
    try:
        return Image.open(source, formats=formats.known_formats())
    except Image.DecompressionBombError:
        # Judged by the whole picture's size. What its decoder can reduce is opened past that check, and judged by us.
        kind = formats.reducible(head)
        if kind is None:
            raise
        if isinstance(source, io.BytesIO):
            source.seek(0)
        factory: Any = Image.OPEN[kind][0]
        return factory(source, "")


def _scale(path: str | Path, image: Image.Image, glance: bool) -> tuple[int, int]:
    """By how much the decoder is to reduce a picture, and how many pixels' memory that takes."""
    width, height = image.size
    pixels = width * height
    if image.format in ("JPEG", "MPO"):
        if pixels > MAX_PIXELS // 8 and _holds_coefficients(image):
            if pixels > MAX_PIXELS:
                raise ImageProblem(path, f"is a progressive JPEG of {width} x {height} px, and these take their full"
                                         " memory at any scale: save it as a baseline JPEG, or smaller")  # fmt: skip
            return (8 if glance else 1), pixels
        most = 8
    else:
        most = 32 if image.format == "JPEG2000" else 1  # encoders keep five halvings unless told otherwise
    scale = 8 if glance and most == 8 else 1
    while scale < most and pixels > MAX_PIXELS and pixels // scale**2 > _REDUCED:
        scale *= 2
    return scale, _checked(path, image.size, scale) * _COSTS.get(image.format or "", 1)


def _checked(path: str | Path, size: tuple[int, int], scale: int = 1) -> int:
    """The pixels of a picture reduced by ``scale``. Raises ``ImageProblem`` where they are none or too many."""
    width, height = size
    if width < 1 or height < 1:
        raise ImageProblem(path, f"is {width} x {height} px")
    if width * height // scale**2 > MAX_PIXELS:
        raise ImageProblem(path, _bomb(f"{width} x {height} px"))
    return width * height // scale**2


def _reduce(image: Image.Image, scale: int) -> None:
    if scale == 1:
        return
    if image.format == "JPEG2000":
        vars(image)["_reduce"] = scale.bit_length() - 1  # its property ``reduce`` hides a method of that name
    else:
        image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))


def _holds_coefficients(image: Image.Image) -> bool:
    """Whether a JPEG comes in several scans: then libjpeg holds all of it in memory, at whatever scale it decodes."""
    file: Any = vars(image)["fp"]  # of ImageFile, which is what was opened
    try:
        file.seek(2)
        components = 0
        while len(marker := file.read(4)) == 4:
            _, kind, length = struct.unpack(">BBH", marker)
            body = file.read(length - 2)
            if kind == 0xDA:
                return body[0] < components
            if kind in (0xC0, 0xC1, 0xC9):
                components = body[5]
            elif 0xC2 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
                return True  # progressive
        return True
    finally:
        file.seek(0)


def _bomb(size: str) -> str:
    return (f"claims {size}, more than the {MAX_PIXELS // 1_000_000} megapixels that its format can be decoded at"
            " (a decompression bomb?): make it smaller")  # fmt: skip


def _unknown(head: bytes, extension: str) -> str:
    if formats.is_raw(head):
        return "is a camera RAW, whatever its name: develop it and save it as PNG or JPEG"
    package = formats.missing_plugin(head, extension)
    if package is not None:
        return f"needs a plugin to be read: pip install {package}"
    return "is no picture that can be read, though its name says so: remove it or save it as PNG"


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


_BUDGET = _Budget(_AT_ONCE)
_lock = threading.Lock()
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

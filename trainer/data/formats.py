"""Which files are pictures, by name and by content, and what reads them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import struct
import threading

from PIL import Image

NOT_PICTURES = {"BUFR", "EPS", "FITS", "GRIB", "HDF5", "IPTC", "MCIDAS", "MPEG", "PDF", "PCD", "SPIDER", "WMF"}
"""Formats that Pillow only stubs, reads in part (of a Photo CD a small copy, of FITS numbers without their scale), that
need other programs, or that match data that is no picture."""
RAW_EXTENSIONS = frozenset((
    ".3fr", ".arw", ".bay", ".cr2", ".cr3", ".crw", ".dcr", ".dcs", ".dng", ".drf", ".erf", ".fff", ".gpr", ".iiq",
    ".k25", ".kdc", ".mef", ".mos", ".mrw", ".nef", ".nrw", ".orf", ".pef", ".ptx", ".raf", ".raw", ".rw2", ".rwl",
    ".sr2", ".srf", ".srw", ".x3f",
))  # fmt: skip
OTHER_EXTENSIONS = frozenset((
    ".afphoto", ".ai", ".clip", ".emf", ".eps", ".exr", ".fits", ".hdr", ".jxr", ".kra", ".pcd", ".procreate", ".psb",
    ".svg", ".svgz", ".wdp", ".wmf", ".xcf",
))  # fmt: skip
"""Pictures to their owner, but not read here."""
PLUGINS = {
    "AVIF": ("pillow_avif", "pillow-avif-plugin", (".avif", ".avifs")),
    "HEIF": ("pillow_heif", "pillow-heif", (".heic", ".heics", ".heif", ".heifs", ".hif")),
    "JXL": ("pillow_jxl", "pillow-jxl-plugin", (".jxl",)),
}
"""Format -> the optional module and package that read it where Pillow does not, and its extensions."""

_MARKS = (
    b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"8BPS\0\1", b"qoif", b"DDS |",
    b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n", b"\0\0\0\x0cJXL \r\n",
)  # fmt: skip
_BRANDS = {
    "AVIF": (b"avif", b"avis"),
    "HEIF": (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
}
_RAW_MARKS = (b"FUJIFILMCCD-RAW", b"FOVb", b"IIRO", b"IIRS", b"MMOR", b"IIU\0", b"\0MRM")
_lock = threading.Lock()


@functools.cache
def extensions() -> frozenset[str]:
    """Lower-case extensions of the pictures that this Pillow opens, or would with a plugin."""
    known_formats()
    known = {e for e, name in Image.registered_extensions().items() if name not in NOT_PICTURES}
    optional = {e for _, _, names in PLUGINS.values() for e in names}
    return frozenset(known | optional | {".jfif"}) - OTHER_EXTENSIONS


def known_formats() -> list[str]:
    """The formats to try, once all plugins that are installed are registered."""
    with _lock:
        return _registered()


@functools.cache
def _registered() -> list[str]:
    Image.init()
    for name, (module, _, _) in PLUGINS.items():
        if name not in Image.OPEN:
            with contextlib.suppress(Exception):  # a plugin that is broken is as good as none
                plugin = importlib.import_module(module)
                if hasattr(plugin, "register_heif_opener"):
                    plugin.register_heif_opener()
    return [f for f in Image.OPEN if f not in NOT_PICTURES]


def looks_like_picture(head: bytes) -> bool:
    """Whether a file's first 32 bytes are those of a picture format with an unmistakable mark."""
    if head.startswith(_MARKS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    if head[4:8] == b"ftyp":
        return any(head[8:12] in brands for brands in _BRANDS.values())
    # "BM" may begin a text: a bitmap has zeros and the length of its header behind it.
    return head[:2] == b"BM" and head[6:10] == b"\0\0\0\0" and head[14:18] in (b"(\0\0\0", b"l\0\0\0", b"|\0\0\0")


def unconverted_colours(head: bytes, image: Image.Image) -> str:
    """What should be known of colours that are given by number (ITU-T H.273) instead of a profile; empty: nothing.

    AVIF and HEIF have them in a ``colr`` box, PNG in a ``cICP`` chunk. Pillow hands the pixels over as they are.
    """
    mark, form = b"colrnclx", ">HH"
    if image.format == "PNG":
        mark, form, head = b"cICP", ">BB", head[: head.find(b"IDAT") + 1]
    elif image.format not in ("AVIF", "HEIF"):
        return ""
    at = head.find(mark) + len(mark)
    if at < len(mark) or at + struct.calcsize(form) > len(head) or image.info.get("icc_profile"):
        return ""
    primaries, transfer = struct.unpack_from(form, head, at)
    if transfer in (16, 18):
        return f"is stored in HDR ({'PQ' if transfer == 16 else 'HLG'}): its colours are taken for sRGB and look dull"
    if primaries in (9, 11, 12):
        return "has wide colours without a profile: they are taken for sRGB and look dull"
    return ""


def reducible(head: bytes) -> str | None:
    """The format of a file with this beginning if its decoder can make it smaller, else None."""
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return "JPEG2000" if head.startswith((b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n")) else None


def is_raw(head: bytes, image: Image.Image | None = None) -> bool:
    """Whether a file's first 32 bytes, or what Pillow found in it, are a camera RAW's, whatever its name.

    DNG, a reduced preview with the real picture in sub-directories (NEF and its like), or a maker's own mark.
    """
    if head.startswith(_RAW_MARKS) or head[4:12] == b"ftypcrx " or head[6:14] == b"HEAPCCDR":
        return True
    tags = getattr(image, "tag_v2", None)
    if image is None or image.format != "TIFF" or tags is None:
        return False
    return head[8:10] == b"CR" or 50706 in tags or (tags.get(254) == 1 and 330 in tags)


def missing_plugin(head: bytes, extension: str) -> str | None:
    """The package that would read a file with this beginning, or else this extension, if none is installed."""
    found = [f for f, brands in _BRANDS.items() if head[4:8] == b"ftyp" and head[8:12] in brands]
    if jxl_codestream(head) is not None:
        found = ["JXL"]
    if not found and not looks_like_picture(head):
        found = [f for f, (_, _, names) in PLUGINS.items() if extension in names]
    return next((PLUGINS[f][1] for f in found if f not in Image.OPEN), None)


def jxl_codestream(data: bytes) -> int | None:
    """Where the codestream begins in a JPEG XL file: bare, or in the boxes of a container (ISO 18181-2). None: is none.

    For a container of which ``data`` is only the beginning this may be the end of ``data``.
    """
    if data[:2] == b"\xff\x0a":
        return 0
    if data[:8] != b"\0\0\0\x0cJXL ":
        return None
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        header = 8
        if size == 1 and at + 16 <= len(data):
            size, header = struct.unpack_from(">Q", data, at + 8)[0], 16
        if kind in (b"jxlc", b"jxlp"):
            return min(len(data), at + header + (4 if kind == b"jxlp" else 0))
        if size < header:
            break
        at += size
    return len(data)


def jxl_size(data: bytes) -> tuple[int, int] | None:
    """Width and height (either way round) of a JPEG XL picture from its beginning: SizeHeader of ISO 18181-1.

    The plugin decodes a file as it opens it, so that its size must be known before. None: cannot be told.
    """
    start = jxl_codestream(data)
    if start is None or data[start : start + 2] != b"\xff\x0a":
        return None
    bits, used = int.from_bytes(data[start + 2 : start + 18], "little"), 0

    def take(count: int) -> int:
        nonlocal used
        used += count
        return (bits >> (used - count)) & ((1 << count) - 1)

    def side() -> int:
        return 8 * (take(5) + 1) if small else 1 + take((9, 13, 18, 30)[take(2)])

    small = take(1)
    height = side()
    ratio = take(3)
    over, under = ((0, 1), (1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))[ratio]
    width = height * over // under if ratio else side()
    return (width, height) if used <= 8 * (len(data) - start - 2) else None

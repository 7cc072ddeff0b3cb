"""Which files are pictures, by name and by content: optional plugins, camera RAW, sizes told before decoding."""

import io
import json
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data import formats
from trainer.data.decode import MAX_PIXELS
from trainer.data.images import ImageProblem, examine, load_image
from trainer.data.scan import survey

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
JXL = b"\0\0\0\x0cJXL \r\n\x87\n"
UPRIGHT = np.zeros((32, 48, 3), dtype=np.uint8)
UPRIGHT[:16, :16] = (255, 0, 0)
UPRIGHT[16:, :16] = (0, 0, 255)


def save(path, pixels, **options):
    for module in ("pillow_heif", "pillow_jxl"):
        pytest.importorskip(module, reason=f"{module} is optional: pip install -r requirements-dev.txt")
    formats.known_formats()
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.mark.parametrize("name", ["a.heic", "a.HEIF", "renamed.jpg"])
def test_heic_is_read_by_content(tmp_path, name):
    path = save(tmp_path / name, UPRIGHT, format="HEIF", quality=-1)
    assert np.abs(np.asarray(load_image(path)).astype(int) - UPRIGHT).max() <= 2
    assert (examine(path).width, examine(path).height) == (48, 32)


@pytest.mark.parametrize("name", ["a.jxl", "A.JXL", "renamed.png"])
def test_jpeg_xl_is_read_by_content(tmp_path, name):
    path = save(tmp_path / name, UPRIGHT, format="JXL", lossless=True)
    assert (np.asarray(load_image(path)) == UPRIGHT).all()
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    save(path, grey, format="JXL", lossless=True)
    assert (np.asarray(load_image(path)) == grey[..., None]).all()
    save(path, grey.astype(np.uint16) * 257, format="JXL", lossless=True)  # the plugin says that these are linear
    light = grey[..., None] / 255
    srgb = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055) * 255
    assert np.abs(np.asarray(load_image(path)) - srgb).max() <= 2
    alpha = np.full((4, 4), 128, np.uint8)
    save(path, np.dstack([UPRIGHT[:4, :4], alpha]), format="JXL", lossless=True)
    assert np.abs(np.asarray(load_image(path, "#0000ff")).astype(int) - (128, 0, 127)).max() <= 1
    assert examine(path).has_alpha


@pytest.mark.filterwarnings("ignore:Using JPEG reconstruction")
def test_orientation_is_applied_once(tmp_path):
    """HEIC's and JPEG XL's decoders turn pictures themselves; a JPEG that was packed into JPEG XL stays as it was."""
    stored = np.ascontiguousarray(np.rot90(UPRIGHT))
    exif = Image.Exif()
    exif[0x0112] = 6
    cases = [("a.heic", {"quality": -1}), ("a.jpg", {"quality": 100, "subsampling": 0}), ("a.avif", {"quality": 100})]
    for name, options in cases:
        path = save(tmp_path / name, stored, exif=exif.tobytes(), **options)
        seen = np.asarray(load_image(path)).astype(int)
        assert seen.shape == UPRIGHT.shape and np.abs(seen[20:28, 4:12] - (0, 0, 255)).max() <= 4, name
    with Image.open(tmp_path / "a.jpg") as jpeg:
        jpeg.save(tmp_path / "packed.jxl")
    assert (np.asarray(load_image(tmp_path / "packed.jxl")) == np.asarray(load_image(tmp_path / "a.jpg"))).all()
    # ISO 18181-2: EXIF's orientation is for information only in a JPEG XL file, its own field decides.
    path = save(tmp_path / "told.jxl", UPRIGHT, lossless=True, exif=exif.tobytes())
    assert (np.asarray(load_image(path)) == UPRIGHT).all()
    assert (examine(path).width, examine(path).height) == (48, 32)


@pytest.mark.parametrize("name", ["a.heic", "a.jxl"])
def test_broken_files_of_optional_formats_are_told(tmp_path, name):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = save(tmp_path / name, noise).read_bytes()
    for share in (0.03, 0.3, 0.6, 0.9):
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        for read in (examine, load_image):
            with pytest.raises(ImageProblem, match="cannot be decoded|is no picture"):
                read(tmp_path / name)


def test_without_plugins_these_files_are_skipped_with_what_to_install(tmp_path):
    files = {"a.heic": HEIC, "photo.jpg": HEIC, "b.jxl": JXL, "c.jxl": b"\xff\x0a\xff\xff", "notes.txt": b"a caption"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    Image.new("RGB", (32, 32)).save(tmp_path / "usable.png")
    code = """
import json, sys
sys.modules.update(pillow_heif=None, pillow_jxl=None)  # as where they are not installed
from trainer.config import DatasetConfig
from trainer.data.scan import survey
report = survey(DatasetConfig(folder=sys.argv[1], resolution=64, bucket_step=16))
print(json.dumps([report.skipped, len(report.samples)]))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    skipped, usable = json.loads(done.stdout)
    package = {"a.heic": "pillow-heif", "photo.jpg": "pillow-heif", "b.jxl": "pillow-jxl-plugin"}
    package["c.jxl"] = package["b.jxl"]
    assert {p: r.split("pip install ")[-1] for p, r in skipped} == package and usable == 1


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (48, 32), (256, 256), (300, 200), (257, 263), (1000, 9), (5, 700),
                                  (1600, 900), (900, 1600), (64, 32), (1, 9000)])  # fmt: skip
@pytest.mark.parametrize("boxed", [True, False])
def test_the_size_of_a_jpeg_xl_is_told_from_its_beginning(tmp_path, size, boxed):
    path = save(tmp_path / "a.jxl", np.zeros((size[1], size[0], 3), np.uint8), effort=1, use_container=boxed)
    data = path.read_bytes()
    assert (data[:2] == b"\xff\x0a") != boxed
    found = formats.jxl_size(data)
    assert found is not None and sorted(found) == sorted(size)
    for cut in range(len(data)):
        formats.jxl_size(data[:cut])


def test_a_bomb_in_jpeg_xl_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    pytest.importorskip("pillow_jxl")
    formats.known_formats()
    monkeypatch.setitem(Image.OPEN, "JXL", (lambda *a: pytest.fail("was decoded"), Image.OPEN["JXL"][1]))
    side = 1 << 20
    bits = (3 << 1) | (side - 1) << 3 | 1 << 33  # height in 30 bits, as wide as high
    (tmp_path / "bomb.jxl").write_bytes(b"\xff\x0a" + bits.to_bytes(12, "little"))
    with pytest.raises(ImageProblem, match=f"claims {side} x {side} px, more than the {MAX_PIXELS // 10**6} mega"):
        examine(tmp_path / "bomb.jxl")


RAWS = {
    "fuji.jpg": b"FUJIFILMCCD-RAW 0201FF", "sigma.png": b"FOVb\0\0\3\0", "olympus.jpg": b"IIRO\x08\0\0\0",
    "panasonic.tif": b"IIU\0\x18\0\0\0", "canon.jpg": b"\0\0\0\x18ftypcrx \0\0\0\1", "minolta.png": b"\0MRM\0\0\0\0",
    "old.jpg": b"II\x1a\0\0\0HEAPCCDR",
}  # fmt: skip


def test_camera_raw_is_refused_by_name_and_by_content(tmp_path):
    thumbnail = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(thumbnail, format="JPEG")
    for name in ("a.NEF", "b.cr2", "c.dng"):  # with a whole picture inside: a thumbnail must not be trained
        (tmp_path / name).write_bytes(thumbnail.getvalue())
    for name, head in RAWS.items():
        (tmp_path / name).write_bytes(head.ljust(64, b"\0") + thumbnail.getvalue())
    report = survey(DatasetConfig(folder=str(tmp_path), resolution=64, bucket_step=16))
    assert len(report.skipped) == len(RAWS) + 3 and not report.samples
    assert all("camera RAW" in reason for _, reason in report.skipped), report.skipped


def test_looks_like_picture():
    def head(**options):
        stream = io.BytesIO()
        Image.fromarray(UPRIGHT).save(stream, **options)
        return stream.getvalue()[:32]

    for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "QOI", "JPEG2000"):
        assert formats.looks_like_picture(head(format=name)), name
    assert formats.looks_like_picture(HEIC) and formats.looks_like_picture(JXL)
    others = (b"", b"BMW is a car, and this is its caption", b"P3 is a text", b"\0\0\0\x18ftypisom", b"RIFF1234WAVE")
    for data in others:
        assert not formats.looks_like_picture(data)


def test_colours_by_number_are_warned_of(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(UPRIGHT).save(path)
    plain = path.read_bytes()
    told = {(1, 13): "", (9, 16): "HDR (PQ)", (9, 18): "HDR (HLG)", (12, 13): "wide colours", (1, 1): ""}
    for (primaries, transfer), expected in told.items():
        body = b"cICP" + bytes([primaries, transfer, 0, 1])
        chunk = struct.pack(">I", 4) + body + struct.pack(">I", zlib.crc32(body))
        path.write_bytes(plain[:33] + chunk + plain[33:])
        warnings = examine(path).warnings
        assert len(warnings) == bool(expected) and expected in "".join(warnings)
        assert (np.asarray(load_image(path)) == UPRIGHT).all()
    path = tmp_path / "a.avif"
    Image.fromarray(UPRIGHT).save(path)
    data = path.read_bytes()
    assert examine(path).warnings == ()
    at = data.index(b"colrnclx") + 8
    path.write_bytes(data[:at] + struct.pack(">HH", 9, 16) + data[at + 4 :])
    assert "HDR" in examine(path).warnings[0]


def test_a_jpeg_xl_that_hides_its_size_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    pytest.importorskip("pillow_jxl")
    formats.known_formats()
    monkeypatch.setitem(Image.OPEN, "JXL", (lambda *a: pytest.fail("was decoded"), Image.OPEN["JXL"][1]))
    for data in (JXL + struct.pack(">I4s", 1 << 20, b"Exif") + bytes(1000), JXL, b"\xff\x0a"):
        (tmp_path / "a.jxl").write_bytes(data)
        with pytest.raises(ImageProblem, match="size is not found"):
            examine(tmp_path / "a.jxl")

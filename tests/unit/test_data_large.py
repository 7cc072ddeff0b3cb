"""Huge pictures, many pictures and bombs: memory stays bounded."""

import io
import os
import struct
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from PIL import Image

from trainer.data import decode
from trainer.data.images import ImageProblem, examine, fit, load_image

MEASURE = """
import sys
from trainer.config import DatasetConfig
from trainer.data.images import load_fitted
from trainer.data.scan import scan_folder

def peak():  # of this program alone: getrusage's begins with what its parent had
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) // 1024 for line in f if line.startswith("VmHWM"))

report = scan_folder(DatasetConfig(folder=sys.argv[1], resolution=256))
scanned = peak()
for sample in report.samples[:1]:
    config = DatasetConfig(folder=".", crop=sys.argv[2])
    pixels = load_fitted(sample.path, (256, 192), config, content_hash=sample.content_hash)
    assert pixels.shape == (192, 256, 3) and 0.3 < pixels.mean() < 0.7  # of a ramp, and of grey noise
print(len(report.samples), report.samples[0].width, scanned, peak(), len(report.skipped))
"""


def measured(folder, crop="centre"):
    """Number of samples, width of the first, peak MiB of the scan and of loading the first, number skipped."""
    command = [sys.executable, "-c", MEASURE, str(folder), crop]
    # Otherwise glibc keeps a heap for each of 8 threads a core.
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MALLOC_ARENA_MAX": "2"})
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.splitlines()[-1].split()]


def tall_jpeg(width, height, **options):
    """A baseline JPEG whose rows of blocks are all alike, each behind a restart mark: drawn in no memory."""
    row = np.linspace(0, 255, width).astype(np.uint8)
    step = 8 if options.get("mode", "L") == "L" else 16
    stream = io.BytesIO()
    Image.fromarray(np.tile(row, (step, 1))).convert(options.get("mode", "L")).save(
        stream, format="JPEG", quality=50, restart_marker_rows=1)  # fmt: skip
    data = bytearray(stream.getvalue())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 7] = struct.pack(">H", height)
    scan = data.index(b"\xff\xda")
    start = scan + 2 + struct.unpack(">H", data[scan + 2 : scan + 4])[0]
    body, end = bytes(data[start:-2]), bytes(data[-2:])
    assert end == b"\xff\xd9"
    rows = -(-height // step)
    marks = (b"".join((body, bytes([0xFF, 0xD0 + i % 8]))) for i in range(rows - 1))
    return bytes(data[:start]) + b"".join(marks) + body + end


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("crop", ["centre", "focus"])
def test_a_jpeg_of_400_megapixels_is_scanned_and_trained_in_bounded_memory(tmp_path, crop):
    (tmp_path / "big.jpg").write_bytes(tall_jpeg(20000, 20000))
    assert decode.MAX_PIXELS < 20000 * 20000
    count, width, scanned, loaded, _ = measured(tmp_path, crop)
    assert (count, width) == (1, 20000)
    # Whole it takes 400 MB as it is and 1600 MB as RGB.
    assert scanned < 160 and loaded < 350


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("side", "few", "many", "growth"),
    [(1024, 8, 200, 60), (16, 100, 2100, 16)],  # 1.4 GB more of files and pixels; 8 KB for each picture's facts
)
def test_memory_does_not_grow_with_the_pictures(tmp_path, side, few, many, growth):
    picture = tmp_path / "picture"
    Image.effect_noise((side, side), 4).convert("RGB").save(picture, format="BMP")
    peaks = []
    for count in (few, many):
        folder = tmp_path / str(count)
        folder.mkdir()
        for i in range(count):
            os.link(picture, folder / f"{i}.bmp")
        found = measured(folder)
        assert found[0] == count and found[4] == 0
        peaks.append(found[2])
    assert peaks[1] - peaks[0] < growth


def test_pictures_over_the_limit_are_reduced_where_the_format_allows(tmp_path, monkeypatch):
    smooth = np.linspace(0, 255, 512 * 768 * 3).reshape(512, 768, 3).astype(np.uint8)
    for name in ("a.jpg", "a.jp2", "a.png", "a.webp"):
        Image.fromarray(smooth).save(tmp_path / name, quality=95)
    whole = {name: fit(load_image(tmp_path / name), (96, 64)) for name in ("a.jpg", "a.jp2")}
    monkeypatch.setattr(decode, "MAX_PIXELS", 100_000)
    monkeypatch.setattr(decode, "_REDUCED", 50_000)
    monkeypatch.setattr("trainer.data.images.MAX_PIXELS", 100_000)
    for name, pixels in whole.items():
        assert load_image(tmp_path / name).size == (192, 128)
        assert np.abs(fit(load_image(tmp_path / name), (96, 64)) - pixels).max() < 0.02
        found = examine(tmp_path / name)
        assert (found.width, found.height) == (768, 512) and "smaller scale" in found.warnings[0]
    for name in ("a.png", "a.webp"):
        for read in (examine, load_image):
            with pytest.raises(ImageProblem, match=f"{name}: claims 768 x 512 px, more than the 0 megapixels"):
                read(tmp_path / name)


def test_jpegs_that_must_be_held_whole_are_refused_over_the_limit(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg", progressive=True)
    Image.fromarray(noise).save(tmp_path / "plain.jpg")
    assert examine(tmp_path / "a.jpg").width == 256
    monkeypatch.setattr(decode, "MAX_PIXELS", 10_000)
    with pytest.raises(ImageProblem, match="progressive JPEG of 256 x 256 px"):
        examine(tmp_path / "a.jpg")
    assert examine(tmp_path / "plain.jpg").width == 256


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_scans_of_a_jpeg_are_told_apart(tmp_path, mode):
    for progressive in (False, True):
        path = tmp_path / "a.jpg"
        Image.new(mode, (64, 64)).save(path, progressive=progressive)
        with Image.open(path) as image:
            assert decode._holds_coefficients(image) is progressive
            assert image.load() is not None  # the file is where it was
    (tmp_path / "tall.jpg").write_bytes(tall_jpeg(64, 200, mode=mode))
    assert examine(tmp_path / "tall.jpg").height == 200
    data = bytearray((tmp_path / "tall.jpg").read_bytes())
    with Image.open(tmp_path / "tall.jpg") as image:
        assert decode._holds_coefficients(image) is False
    if mode == "RGB":  # one component in the first scan: the others follow in scans of their own
        data[data.index(b"\xff\xda") + 4] = 1
        with Image.open(io.BytesIO(data)) as image:
            assert decode._holds_coefficients(image) is True


def test_decompression_bombs_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as other people's nodes leave it
    path = tmp_path / "bomb.png"
    header = struct.pack(">IIBBBBB", 20000, 20000, 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(b"\0"))
                     + _chunk(b"IEND", b""))  # fmt: skip
    with pytest.raises(ImageProblem, match=r"bomb\.png: claims 20000 x 20000 px, more than the 178 megapixels"):
        examine(path)
    monkeypatch.undo()
    with pytest.raises(ImageProblem, match="bomb"):
        examine(path)


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def test_large_pictures_are_converted_in_strips_to_the_same_pixels(tmp_path, monkeypatch):
    from trainer.data import colour

    chance = np.random.default_rng(3)
    rgba = chance.integers(0, 256, (37, 23, 4), dtype=np.uint8)
    deep = chance.integers(0, 65536, (37, 23), dtype=np.uint16)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    Image.fromarray(rgba[..., :3]).quantize(16).save(tmp_path / "p.png", transparency=3)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    Image.fromarray(deep.astype(np.float32) - 300).save(tmp_path / "float.tiff")
    Image.fromarray(rgba[..., 0]).convert("1").save(tmp_path / "bits.tiff")
    paths = sorted(tmp_path.iterdir())
    whole = [np.asarray(load_image(path, "#204060")) for path in paths]
    monkeypatch.setattr(colour, "_STRIP", 100)
    for path, expected in zip(paths, whole, strict=True):
        assert (np.asarray(load_image(path, "#204060")) == expected).all(), path


def test_memory_budget_bounds_what_is_decoded_at_once():
    budget, inside, most, lock = decode._Budget(10), [0], [0], threading.Lock()

    def work():
        with budget.take(4):
            with lock:
                inside[0] += 4
                most[0] = max(most[0], inside[0])
            threading.Event().wait(0.005)
            with lock:
                inside[0] -= 4

    threads = [threading.Thread(target=work) for _ in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert most[0] == 8 and inside[0] == 0
    with budget.take(1000):  # larger than all of it: alone, but never stuck
        pass

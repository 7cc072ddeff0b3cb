"""Damaged pictures of every kind: always a reason, never another exception, and the scan foresees the encoding."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from trainer.data import formats
from trainer.data.images import ImageProblem, examine, load_image

KINDS = [
    ("PNG", "RGB"), ("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"), ("WEBP", "RGBA"),
    ("BMP", "RGB"), ("TIFF", "RGB"), ("TGA", "RGB"), ("ICO", "RGBA"), ("PPM", "RGB"), ("PCX", "RGB"), ("QOI", "RGB"),
    ("AVIF", "RGBA"), ("JPEG2000", "RGB"), ("MPO", "RGB"), ("TIFF", "F"), ("HEIF", "RGBA"), ("JXL", "RGBA"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_damage(tmp_path, kind, mode):
    formats.known_formats()
    if kind not in Image.SAVE:
        pytest.skip(f"{kind} is optional: pip install -r requirements-dev.txt")
    chance = random.Random(f"{kind} {mode}")
    pixels = np.random.default_rng(1).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    options = {"exif": exif} if kind in ("JPEG", "PNG") else {}
    Image.fromarray(pixels).convert(mode).save(stream, format=kind, **options)
    path, refused = tmp_path / f"a.{kind.lower()}", 0
    for _ in range(40):
        data = bytearray(stream.getvalue())
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        for _ in range(chance.choice([0, 1, 3, 20])):
            if data:
                data[chance.randrange(min(len(data), chance.choice([64, 400, 10**9])))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            found = examine(path)
        except ImageProblem as problem:
            assert str(path) in str(problem) and "\n" not in str(problem) and problem.reason
            refused += 1
            continue
        assert load_image(path).size == (found.width, found.height)
    assert refused >= 1

"""What is kept of a picture whose shape is not its bucket's."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from trainer.config import CROPS
from trainer.data.crop import crop_box
from trainer.data.images import fit, mirrored


def picture(size, box, seed=0):
    """Flat grey with a patch of detail in ``box``."""
    pixels = np.full((size[1], size[0], 3), 120, dtype=np.uint8)
    left, top, right, bottom = box
    chance = np.random.default_rng(seed)
    pixels[top:bottom, left:right] = chance.integers(0, 256, (bottom - top, right - left, 1), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("size", "bucket", "crop", "expected"),
    [
        ((300, 100), (64, 64), "centre", (100, 0, 200, 100)),
        ((300, 100), (64, 64), "top", (100, 0, 200, 100)),
        ((100, 300), (64, 64), "centre", (0, 100, 100, 200)),
        ((100, 300), (64, 64), "top", (0, 0, 100, 100)),
        ((100, 300), (32, 64), "top", (0, 0, 100, 200)),
        ((64, 64), (64, 64), "focus", (0, 0, 64, 64)),
        ((300, 100), (64, 64), "focus", (100, 0, 200, 100)),  # flat: the centre
    ],
)
def test_boxes(size, bucket, crop, expected):
    assert crop_box(Image.new("RGB", size, "teal"), bucket, crop) == pytest.approx(expected)


@pytest.mark.parametrize("at", [0, 130, 500, 799, 860])
@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("scale", [1, 4])
def test_focus_holds_the_detail(at, upright, scale):
    image = picture((1000, 200), (at, 60, at + 120, 160), seed=at).resize((1000 * scale, 200 * scale), 0)
    if upright:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    box = [v / scale for v in crop_box(image, (128, 128), "focus")]
    low, high = (box[1], box[3]) if upright else (box[0], box[2])
    assert low <= at + 4 and high >= at + 116  # 1/256 of the length is what the small copy can tell
    assert high - low == pytest.approx(200) and low >= 0 and high <= 1000
    assert crop_box(image, (128, 128), "focus") == crop_box(image.copy(), (128, 128), "focus")


def test_focus_finds_a_drawing_on_a_plain_ground_and_not_a_bright_wall():
    image = Image.new("RGB", (1600, 400), (90, 90, 90))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 500, 400), fill=(250, 250, 250))  # brighter, but nothing happens there
    for i in range(12):
        draw.ellipse((1000 + 15 * i, 60 + 20 * i, 1090 + 15 * i, 150 + 20 * i), outline=(255, 220, 180), width=3)
    left, _, right, _ = crop_box(image, (256, 256), "focus")
    assert left <= 1000 and right >= 1255


@given(width=st.integers(1, 400), height=st.integers(1, 400), w=st.integers(1, 24), h=st.integers(1, 24),
       crop=st.sampled_from(CROPS), seed=st.integers(0, 99))  # fmt: skip
@example(width=1, height=10000, w=1, h=4, crop="focus", seed=0)
@example(width=10000, height=1, w=4, h=1, crop="focus", seed=0)
@example(width=1, height=1, w=24, h=1, crop="top", seed=0)
@settings(max_examples=150, deadline=None)
def test_any_picture_fits_any_bucket(width, height, w, h, crop, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image, bucket = Image.fromarray(pixels), (16 * w, 16 * h)
    left, top, right, bottom = crop_box(image, bucket, crop)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert right - left == pytest.approx(width) or bottom - top == pytest.approx(height)
    assert (right - left) * bucket[1] == pytest.approx((bottom - top) * bucket[0])
    fitted = fit(image, bucket, crop)
    assert fitted.shape == (bucket[1], bucket[0], 3) and fitted.dtype == np.float32
    assert fitted.min() >= 0 and fitted.max() <= 1
    # A picture and its mirror image show the same part, where there is one that holds most.
    flipped = crop_box(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), bucket, crop)
    if crop != "focus":
        assert flipped == pytest.approx((width - right, top, width - left, bottom))


def test_mirrored_is_exact():
    pixels = np.random.default_rng(0).random((8, 6, 3), dtype=np.float32)
    turned = mirrored(pixels)
    assert turned.flags.c_contiguous and (turned == pixels[:, ::-1]).all() and (mirrored(turned) == pixels).all()
    assert (mirrored(pixels[..., 0]) == pixels[:, ::-1, 0]).all()

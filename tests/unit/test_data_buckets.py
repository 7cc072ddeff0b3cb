"""Sizes that pictures are trained at."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.config import DatasetConfig
from trainer.data.buckets import bucket_sizes, buckets_for, cropped_share, enlargement


def bucket_for(width, height, config):
    """The bucket of a dataset with one resolution."""
    (bucket,) = buckets_for(width, height, config)
    return bucket


SIDES = st.integers(1, 30000)
SETTINGS = st.tuples(st.integers(64, 2048), st.sampled_from([16, 32, 48, 64])).filter(lambda p: p[0] >= p[1])


@given(width=SIDES, height=SIDES, chosen=SETTINGS, upscale=st.booleans())
@example(width=1, height=30000, chosen=(1024, 64), upscale=True)
@example(width=64, height=64, chosen=(64, 64), upscale=False)
@settings(max_examples=300, deadline=None)
def test_every_picture_gets_a_sound_bucket_or_a_reason(width, height, chosen, upscale):
    resolution, step = chosen
    config = DatasetConfig(folder="x", resolution=resolution, bucket_step=step, upscale=upscale)
    try:
        w, h = bucket_for(width, height, config)
    except ValueError as error:
        assert not upscale and min(width, height) < step and str(step) in str(error)
        return
    assert w % step == 0 and h % step == 0 and w >= step and h >= step
    assert w * h <= resolution * resolution
    if not upscale:
        assert enlargement(width, height, (w, h)) <= 1
    turned = bucket_for(height, width, config)
    assert sorted(turned) == sorted((w, h))
    if width != height and upscale:
        assert cropped_share(height, width, turned) == pytest.approx(cropped_share(width, height, (w, h)))


def test_common_shapes_at_1024():
    config = DatasetConfig(folder="x")
    expected = {(4000, 4000): (1024, 1024), (4032, 3024): (1152, 896), (3024, 4032): (896, 1152)}
    expected |= {(1920, 1080): (1344, 768), (10000, 100): (2048, 512), (3, 2): (1216, 832)}
    assert {size: bucket_for(*size, config) for size in expected} == expected
    assert all(w * h >= 0.75 * 1024**2 for w, h in bucket_sizes(1024, 64))


def test_a_resolution_that_is_no_multiple_of_the_step_keeps_squares():
    assert bucket_for(500, 500, DatasetConfig(folder="x", resolution=1000)) == (960, 960)


def test_demo_size():
    assert bucket_for(64, 64, DatasetConfig(folder="x", resolution=64, bucket_step=16)) == (64, 64)


def test_small_pictures_shrink_the_bucket_without_upscaling():
    config = DatasetConfig(folder="x", upscale=False)
    assert bucket_for(700, 500, config) == (640, 448)
    assert bucket_for(5000, 5000, config) == (1024, 1024)
    with pytest.raises(ValueError, match="is 700 x 50 px"):
        bucket_for(700, 50, config)


def test_measures():
    assert cropped_share(200, 100, (64, 64)) == pytest.approx(0.5)
    assert cropped_share(64, 64, (128, 128)) == 0
    assert enlargement(32, 64, (64, 64)) == 2


RESOLUTIONS = st.lists(st.integers(64, 2048), min_size=1, max_size=4)


@given(width=SIDES, height=SIDES, resolutions=RESOLUTIONS, step=st.sampled_from([16, 32, 64]), upscale=st.booleans())
@example(width=700, height=500, resolutions=[512, 1024], step=64, upscale=False)
@example(width=30, height=5000, resolutions=[512, 1024], step=32, upscale=False)
@settings(max_examples=200, deadline=None)
def test_every_resolution_gets_its_bucket_once(width, height, resolutions, step, upscale):
    config = DatasetConfig(folder="x", resolution=resolutions[0], more_resolutions=tuple(resolutions[1:]),
                           bucket_step=step, upscale=upscale)  # fmt: skip
    try:
        found = buckets_for(width, height, config)
    except ValueError as error:
        assert not upscale and min(width, height) < step and f"{width} x {height}" in str(error)
        return
    own = {bucket_for(width, height, DatasetConfig(folder="x", resolution=r, bucket_step=step)) for r in resolutions}
    assert found and len(set(found)) == len(found)
    for bucket in found:
        assert min(bucket) >= step and all(side % step == 0 for side in bucket)
        assert upscale or enlargement(width, height, bucket) <= 1
    if upscale:
        assert set(found) == own
    else:
        filled = {b for b in own if enlargement(width, height, b) <= 1}
        assert set(found) == filled if filled else len(found) == 1


def test_a_resolution_that_cannot_be_filled_is_left_out():
    sizes = {"folder": "x", "resolution": 1024, "more_resolutions": (512, 768), "upscale": False}
    config = DatasetConfig(**sizes)
    assert buckets_for(4000, 4000, config) == ((1024, 1024), (512, 512), (768, 768))
    assert buckets_for(800, 800, config) == ((512, 512), (768, 768))
    assert buckets_for(400, 400, config) == ((384, 384),)
    assert len(buckets_for(400, 400, DatasetConfig(**sizes | {"upscale": True}))) == 3
    # Resolutions that come to the same sizes are one, and so are those that are named twice.
    assert buckets_for(4000, 4000, DatasetConfig(folder="x", more_resolutions=(1024, 1030))) == ((1024, 1024),)

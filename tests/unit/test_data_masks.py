"""Masks of the loss: which file is whose, and what they are in latent pixels."""

import numpy as np
import pytest
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data import masks
from trainer.data.images import ImageProblem, examine, mirrored
from trainer.data.masks import is_mask, latent_mask, pair
from trainer.data.scan import scan_folder, survey


def config(folder=".", **options):
    return DatasetConfig(folder=str(folder), resolution=64, bucket_step=16, **options)


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.png", False), ("a.mask.png", True), ("sub/a.MASK.webp", True), ("masks/a.png", True),
        ("sub/Masks/a.jpg", True), ("masks/sub/a.png", True), ("a-masklabel.png", True), ("mask.png", False),
        ("a.mask", False), ("masks.png", False), ("unmasked/a.png", False), ("mask/a.png", False), ("amask.png", False),
    ],
)  # fmt: skip
def test_masks_by_name(name, expected):
    assert is_mask(name) is expected


def test_pairs():
    pictures = ["a.png", "a.jpg", "b.webp", "sub/a.png", "sub/c.d.png", "lonely.png", "e.png"]
    found = ["a.mask.PNG", "masks/b.tiff", "masks/sub/a.png", "sub/masks/c.d.jpg", "nobody.mask.png", "masks/a.jpg.png",
             "e-masklabel.png", "masks/e.png"]  # fmt: skip
    assert pair(pictures, found) == {
        "a.png": "a.mask.PNG", "a.jpg": "masks/a.jpg.png", "b.webp": "masks/b.tiff", "sub/a.png": "masks/sub/a.png",
        "sub/c.d.png": "sub/masks/c.d.jpg", "e.png": "e-masklabel.png",
    }  # fmt: skip
    assert pair(pictures, reversed(found)) == pair(pictures, found)


def test_masks_are_counted_and_never_trained(tmp_path):
    for name in ("a.png", "b.jpg", "sub/c.png"):
        save(tmp_path / name, np.full((64, 64, 3), len(name)))
    for name in ("a.mask.png", "masks/b.png", "sub/masks/c.png", "lost.mask.png"):
        save(tmp_path / name, np.full((64, 64), 255))
    for options, used in (({}, True), ({"masks": False}, False)):
        report = survey(config(tmp_path, **options))
        assert [s.relative for s in report.samples] == ["a.png", "b.jpg", "sub/c.png"]
        assert all(bool(s.mask_hash) is used for s in report.samples)
        assert report.ignored == 4
        assert [p for p, what in report.warnings if "no picture is called so" in what] == ["lost.mask.png"] * used


def test_a_mask_that_cannot_be_used_takes_its_picture_with_it(tmp_path):
    picture = save(tmp_path / "a.png", np.zeros((64, 64, 3)))
    mask = tmp_path / "a.mask.png"
    mask.write_bytes(b"no picture")
    with pytest.raises(ImageProblem, match=r"a\.png: has a mask, a\.mask\.png, that is no picture") as caught:
        examine(picture, config(), mask)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "warned"),
    [((64, 96), False), ((32, 48), False), ((33, 49), False), ((640, 960), False), ((64, 64), True), ((96, 64), True)],
)
def test_masks_of_other_shapes_are_warned_of(tmp_path, size, warned):
    picture = save(tmp_path / "a.png", np.zeros((64, 96, 3)))
    mask = save(tmp_path / "a.mask.png", np.zeros(size))
    found = examine(picture, config(), mask)
    assert (len(found.warnings) == 1) is warned and len(found.mask_hash) == 64
    assert not warned or "96 x 64 px and its mask, a.mask.png" in found.warnings[0]


def test_mask_values_in_latent_pixels(tmp_path):
    picture = save(tmp_path / "a.png", np.zeros((64, 64, 3)))
    pixels = np.zeros((64, 64))
    pixels[:, 32:] = 255
    pixels[:8, :8] = 51
    pixels[8:16, :4] = 255  # half of a latent pixel
    mask = save(tmp_path / "a.mask.png", pixels)
    found = latent_mask(picture, (64, 64), config(), mask)
    expected = np.zeros((8, 8), dtype=np.float32)
    expected[:, 4:] = 1
    expected[0, 0], expected[1, 0] = 0.2, 0.5
    assert found.dtype == np.float32 and found == pytest.approx(expected, abs=1 / 255)
    assert (found[:, 4:] == 1).all()
    for factor in (2, 5):  # the same mask at another size
        save(mask, np.kron(pixels, np.ones((factor, factor))))
        assert latent_mask(picture, (64, 64), config(), mask) == pytest.approx(expected, abs=1 / 255)
    assert (latent_mask(picture, (64, 64), config(masks=False), mask) == 1).all()
    colour = np.zeros((64, 64, 4))
    colour[:, :, :3], colour[:, 32:, 3] = 255, 255  # white, but transparent on the left: black there
    save(mask, colour)
    assert latent_mask(picture, (64, 64), config(), mask).tolist() == [[0] * 4 + [1] * 4] * 8


@pytest.mark.parametrize("crop", ["centre", "top", "focus"])
@pytest.mark.parametrize("turned", [False, True])
def test_masks_follow_the_crop(tmp_path, crop, turned):
    """What is painted white in the picture is white in its mask: both end at the same place."""
    chance = np.random.default_rng(0)
    pixels = np.zeros((400, 64, 3))
    pixels[320:360, 10:50] = chance.integers(128, 256, (40, 40, 1))
    drawn = pixels[..., 0] > 0
    if turned:
        pixels, drawn = np.swapaxes(pixels, 0, 1), drawn.T
    picture, mask = save(tmp_path / "a.png", pixels), save(tmp_path / "a.mask.png", drawn * 255)
    from trainer.data.images import fit, load_image

    chosen = config(crop=crop)
    for bucket in ((64, 64), (32, 64), (64, 32)):
        seen = fit(load_image(picture), bucket, crop)[..., 0]
        inside = latent_mask(picture, bucket, chosen, mask)
        blocks = seen.reshape(bucket[1] // 8, 8, bucket[0] // 8, 8).max(axis=(1, 3))
        assert ((blocks > 0.3) <= (inside > 0)).all()
        assert ((inside == 1) <= (blocks > 0.3)).all()
        assert (mirrored(inside) == inside[:, ::-1]).all()
    assert bool(latent_mask(picture, (64, 64), chosen, mask).max() > 0) is (crop == "focus")


def test_alpha_as_mask(tmp_path):
    pixels = np.full((64, 64, 4), 200)
    pixels[:, :32, 3] = 0
    pixels[:, 32:48, 3] = 128
    pixels[:, 48:, 3] = 255
    picture = save(tmp_path / "a.png", pixels)
    assert examine(picture).has_alpha
    expected = np.repeat([[0.0, 128 / 255, 1.0]], [4, 2, 2], axis=1) * np.ones((8, 1))
    assert latent_mask(picture, (64, 64), config(alpha="mask")) == pytest.approx(expected)
    assert (latent_mask(picture, (64, 64), config()) == 1).all()
    half = np.zeros((64, 64))
    half[:32] = 255
    both = latent_mask(picture, (64, 64), config(alpha="mask"), save(tmp_path / "a.mask.png", half))
    expected[4:] = 0
    assert both == pytest.approx(expected)


def test_a_changed_mask_is_noticed(tmp_path):
    picture = save(tmp_path / "a.png", np.zeros((64, 64, 3)))
    mask = save(tmp_path / "a.mask.png", np.zeros((64, 64)))
    found = examine(picture, config(), mask)
    hashes = {"content_hash": found.content_hash, "mask_hash": found.mask_hash}
    assert masks.latent_mask(picture, (64, 64), config(), mask, **hashes).max() == 0
    save(mask, np.ones((64, 64)))
    with pytest.raises(ImageProblem, match=r"a\.mask\.png: changed"):
        masks.latent_mask(picture, (64, 64), config(), mask, **hashes)


def test_masks_turn_with_their_own_orientation(tmp_path):
    picture = save(tmp_path / "a.png", np.zeros((32, 64, 3)))
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = np.zeros((64, 32))
    stored[32:] = 255  # turned by 90 degrees to the right: the left half
    mask = save(tmp_path / "a.mask.png", stored, exif=exif)
    assert examine(picture, config(), mask).warnings == ()
    assert latent_mask(picture, (64, 32), config(), mask).tolist() == [[1] * 4 + [0] * 4] * 4


def test_a_folder_of_nothing_but_masks_says_so(tmp_path):
    save(tmp_path / "masks" / "venice.png", np.zeros((64, 64, 3)))
    with pytest.raises(ValueError, match=r"no usable picture.*1 of them masks by their names") as caught:
        scan_folder(config(tmp_path))
    assert "\n" not in str(caught.value)
    # Named as the dataset itself, it is a folder of pictures like any other.
    assert [s.relative for s in scan_folder(config(tmp_path / "masks")).samples] == ["venice.png"]

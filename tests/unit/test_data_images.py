"""One picture of each kind, made here, and the pixels that a person sees."""


import numpy as np
import pytest
from PIL import Image, ImageFile

from trainer.config import DatasetConfig
from trainer.data.images import ImageProblem, examine, fit, load_fitted, load_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)


def pixels(path):
    image = load_image(path)
    assert image.mode == "RGB"
    found = examine(path)
    assert (found.width, found.height) == image.size
    return np.asarray(image)


@pytest.mark.parametrize("extension", ["png", "bmp", "tiff", "webp", "ppm", "tga", "qoi", "PNG", "Tif", "pcx"])
def test_lossless_formats_are_exact(tmp_path, extension):
    path = tmp_path / f"a.{extension}"
    options = {"lossless": True} if extension == "webp" else {}
    Image.fromarray(PIXELS).save(path, **options)
    assert (pixels(path) == PIXELS).all()


@pytest.mark.parametrize("extension", ["jpg", "JPEG", "jfif", "avif", "jp2"])
def test_lossy_formats_are_close(tmp_path, extension):
    smooth = np.linspace(30, 220, 32 * 48 * 3).reshape(32, 48, 3).astype(np.uint8)
    path = tmp_path / f"a.{extension}"
    known = {"jfif": "JPEG"}.get(extension)
    Image.fromarray(smooth).save(path, format=known, quality=95)
    assert np.abs(pixels(path).astype(int) - smooth).max() <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("extension", ["png", "jpg", "tiff", "webp"])
def test_exif_orientation(tmp_path, orientation, extension):
    upright = np.zeros((32, 48, 3), dtype=np.uint8)
    upright[:16, :16] = (255, 0, 0)  # red at the top left, blue at the bottom left
    upright[16:, :16] = (0, 0, 255)
    turn = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}.get(orientation)  # Pillow's transpose that stores it so
    stored = Image.fromarray(upright)
    if turn is not None:
        stored = stored.transpose(Image.Transpose(turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{extension}"
    options = {"webp": {"lossless": True}, "jpg": {"quality": 100, "subsampling": 0}}.get(extension, {})
    stored.save(path, exif=exif, **options)
    seen = pixels(path)
    assert seen.shape == upright.shape
    assert np.abs(seen[4:12, 4:12].astype(int) - (255, 0, 0)).max() <= 4
    assert np.abs(seen[20:28, 4:12].astype(int) - (0, 0, 255)).max() <= 4
    found = examine(path)
    assert (found.width, found.height) == (48, 32)


def test_damaged_exif_does_not_lose_the_picture(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff garbage")
    assert (pixels(path) == PIXELS).all()


def test_animations_give_the_first_frame_and_a_warning(tmp_path):
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.webp", "pages.tiff"):
        path = tmp_path / name
        frames[0].save(path, save_all=True, append_images=frames[1:], **({"lossless": True} if "webp" in name else {}))
        assert (pixels(path) == (255, 0, 0)).all()
        assert ("2 pages" if "pages" in name else "2 frames") in examine(path).warnings[0]
        with pytest.raises(ImageProblem, match=r"has 2 (pages|frames): animations are left out by choice"):
            examine(path, DatasetConfig(folder=".", animations="skip"))
    if "AVIF" in Image.SAVE_ALL:
        frames[0].save(tmp_path / "a.avif", save_all=True, append_images=frames[1:])
        assert np.abs(pixels(tmp_path / "a.avif").astype(int) - (255, 0, 0)).max() <= 4
        assert "2 frames" in examine(tmp_path / "a.avif").warnings[0]
    frames[0].save(tmp_path / "still.gif")
    assert examine(tmp_path / "still.gif").warnings == ()


def test_phone_photos_with_several_pictures_are_ordinary(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (16, 8), "red").save(path, format="MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))])
    with Image.open(path) as image:
        assert image.format == "MPO"
    assert np.abs(pixels(path).astype(int) - (255, 0, 0)).max() <= 2
    found = examine(path, DatasetConfig(folder=".", animations="skip"))
    assert found.warnings == () and (found.width, found.height) == (16, 8)


def test_a_wrong_extension_is_read_by_content(tmp_path):
    path = tmp_path / "a.jpg"
    Image.fromarray(PIXELS).save(path, format="PNG")
    assert (pixels(path) == PIXELS).all()


def _cut(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("extension", ["png", "jpg", "gif", "webp", "bmp", "tiff", "avif"])
def test_a_picture_that_breaks_half_way_is_told(tmp_path, extension, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as other people's nodes leave it
    path = tmp_path / f"a.{extension}"
    noisy = RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noisy).save(path)
    _cut(path, 0.6)
    for read in (examine, load_image):
        with pytest.raises(ImageProblem, match="cannot be decoded|is no picture"):
            read(path)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.png", b"hello, this is no picture", "no picture that can be read"),
        ("a.jpg", b"", "empty file"),
        ("a.nef", b"II*\0", "camera RAW"),
        ("a.CR3", b"", "camera RAW"),
        ("a.svg", b"<svg/>", "not read"),
        ("gone.png", None, "is gone"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, name, data, reason):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    for read in (examine, load_image):
        with pytest.raises(ValueError, match=reason) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_raw_previews_are_refused_whatever_their_name(tmp_path):
    for tags in ({50706: bytes([1, 4, 0, 0])}, {254: 1, 330: 8}):
        path = tmp_path / "a.tif"
        Image.fromarray(PIXELS).save(path, tiffinfo=tags)
        with pytest.raises(ImageProblem, match="camera RAW"):
            examine(path)


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    seen = examine(path).content_hash
    assert load_image(path, content_hash=seen).size == (9, 6)
    Image.fromarray(PIXELS[::-1]).save(path)
    with pytest.raises(ImageProblem, match="changed"):
        load_image(path, content_hash=seen)


def test_loading_and_fitting_at_once_is_the_same(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 8
    alpha = np.arange(54, dtype=np.uint8).reshape(6, 9, 1)
    path = tmp_path / "a.png"
    Image.fromarray(np.concatenate([PIXELS, alpha], axis=2)).save(path, exif=exif)
    config = DatasetConfig(folder=".", background="#102030", crop="top")
    expected = fit(load_image(path, "#102030"), (32, 32), "top")
    assert (load_fitted(path, (32, 32), config, content_hash=examine(path).content_hash) == expected).all()
    with pytest.raises(ImageProblem, match="changed"):
        load_fitted(path, (32, 32), config, content_hash="0")


def test_fit_covers_and_crops_the_centre():
    exact = fit(Image.fromarray(PIXELS), (9, 6))
    assert exact.dtype == np.float32 and (exact == PIXELS / np.float32(255)).all()
    wide = np.zeros((32, 96, 3), dtype=np.uint8)
    wide[:, 32:64] = 255
    assert (fit(Image.fromarray(wide), (32, 32)) == 1).all()
    assert (fit(Image.fromarray(wide), (64, 64))[:, 8:-8] == 1).all()
    tall = fit(Image.fromarray(np.swapaxes(wide, 0, 1).copy()), (16, 32))
    assert tall.shape == (32, 16, 3) and (tall[16] == 1).all()
    # Antialiased: a fine chequerboard becomes grey, not a moire.
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    small = fit(Image.fromarray(np.repeat(board[..., None], 3, -1)), (16, 16))
    assert np.abs(small - 0.5).max() < 0.05



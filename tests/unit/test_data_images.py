"""One picture of each kind, made here, and the pixels that a person sees."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile

from trainer.data.images import ImageProblem, examine, fit, load_image

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


def test_sixteen_bit_is_scaled(tmp_path):
    deep = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    for name in ("a.png", "a.tiff"):
        Image.fromarray(deep).save(tmp_path / name)
        seen = pixels(tmp_path / name)
        assert (seen == np.arange(256).reshape(16, 16, 1)).all()


def test_sixteen_bit_colour_is_scaled(tmp_path):
    deep = PIXELS.astype(">u2") * 257
    path = tmp_path / "a.png"
    path.write_bytes(_png(9, 6, 16, 2, b"".join(b"\0" + row.tobytes() for row in deep)))
    assert (pixels(path) == PIXELS).all()


def test_float_is_scaled(tmp_path):
    ramp = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "a.tiff")
    assert (pixels(tmp_path / "a.tiff") == np.arange(256).reshape(16, 16, 1)).all()
    Image.fromarray(ramp * 1e6 - 10).save(tmp_path / "b.tiff")
    assert np.abs(pixels(tmp_path / "b.tiff").astype(int) - np.arange(256).reshape(16, 16, 1)).max() <= 1


def test_grey_bilevel_palette_and_cmyk(tmp_path):
    grey = Image.fromarray(PIXELS[..., 0])
    grey.save(tmp_path / "grey.png")
    assert (pixels(tmp_path / "grey.png") == PIXELS[..., :1]).all()
    grey.convert("1").save(tmp_path / "bits.png")
    assert set(np.unique(pixels(tmp_path / "bits.png"))) <= {0, 255}
    palette = Image.fromarray(PIXELS).quantize(8)
    palette.save(tmp_path / "palette.gif")
    assert (pixels(tmp_path / "palette.gif") == np.asarray(palette.convert("RGB"))).all()
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    for name in ("cmyk.tiff", "cmyk.jpg"):
        cmyk.save(tmp_path / name, quality=100)
        assert np.abs(pixels(tmp_path / name).astype(int) - (255, 0, 0)).max() <= 2
    lab = ImageCms.applyTransform(Image.new("RGB", (4, 4), (200, 30, 60)), ImageCms.buildTransform(
        ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"))  # fmt: skip
    lab.save(tmp_path / "lab.tiff")
    assert np.abs(pixels(tmp_path / "lab.tiff").astype(int) - (200, 30, 60)).max() <= 2


def test_transparency_is_over_white(tmp_path):
    alpha = RNG.integers(0, 256, (6, 9), dtype=np.uint8)
    weight = alpha[..., None] / 255
    expected = PIXELS * weight + 255 * (1 - weight)
    Image.fromarray(np.dstack([PIXELS, alpha])).save(tmp_path / "rgba.png")
    assert np.abs(pixels(tmp_path / "rgba.png") - expected).max() <= 1
    la = np.dstack([PIXELS[..., 0], alpha])
    Image.fromarray(la).save(tmp_path / "la.png")
    assert np.abs(pixels(tmp_path / "la.png") - expected[..., :1] * [1, 1, 1]).max() <= 1


def test_transparent_colours(tmp_path):
    palette = Image.fromarray(np.array([[0, 1], [1, 2]], dtype=np.uint8), "L").convert("P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.save(tmp_path / "p.png", transparency=bytes([255, 0, 255]))
    assert pixels(tmp_path / "p.png").tolist() == [[[255, 0, 0], [255, 255, 255]], [[255, 255, 255], [0, 0, 255]]]
    rgb = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    rgb.save(tmp_path / "rgb.png", transparency=(1, 2, 3))
    assert pixels(tmp_path / "rgb.png").tolist() == [[[255, 255, 255], [4, 5, 6]]]
    grey = Image.fromarray(np.array([[7, 8]], dtype=np.uint8))
    grey.save(tmp_path / "l.png", transparency=7)
    assert pixels(tmp_path / "l.png").tolist() == [[[255, 255, 255], [8, 8, 8]]]
    deep = Image.fromarray(np.array([[0, 257 * 9]], dtype=np.uint16))
    deep.save(tmp_path / "i16.png", transparency=0)
    assert pixels(tmp_path / "i16.png").tolist() == [[[255, 255, 255], [9, 9, 9]]]


def test_icc_profile_is_converted_to_srgb(tmp_path):
    """Against the colorimetry: linear light with sRGB's primaries, so that only the curve differs."""
    profile = _matrix_profile(gamma=1.0)
    path = tmp_path / "linear.png"
    linear = np.linspace(0.02, 1, 64).reshape(8, 8)
    stored = np.repeat((linear * 255).round().astype(np.uint8)[..., None], 3, -1)
    Image.fromarray(stored).save(path, icc_profile=profile)
    light = stored / 255
    srgb = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055) * 255
    assert np.abs(pixels(path) - srgb).max() <= 2
    assert np.abs(stored - srgb).max() > 40  # so ignoring the profile would have failed
    Image.fromarray(stored[..., 0]).save(path, icc_profile=profile)  # an RGB profile on a grey picture: common
    assert np.abs(pixels(path) - srgb).max() <= 2
    stored4 = np.dstack([stored, np.full(stored.shape[:2], 255, np.uint8)])
    Image.fromarray(stored4).save(path, icc_profile=profile)
    assert np.abs(pixels(path) - srgb).max() <= 2


def test_srgb_and_foreign_profiles_leave_pixels_exact(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, profile in (("srgb", srgb), ("broken", b"no profile"), ("lab", _lab())):
        path = tmp_path / f"{name}.png"
        Image.fromarray(PIXELS).save(path, icc_profile=profile)
        assert (pixels(path) == PIXELS).all(), name


def test_animations_give_the_first_frame_and_a_warning(tmp_path):
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.webp", "pages.tiff"):
        path = tmp_path / name
        frames[0].save(path, save_all=True, append_images=frames[1:], **({"lossless": True} if "webp" in name else {}))
        assert (pixels(path) == (255, 0, 0)).all()
        assert ("2 pages" if "pages" in name else "2 frames") in examine(path).warnings[0]
    frames[0].save(tmp_path / "still.gif")
    assert examine(tmp_path / "still.gif").warnings == ()


def test_phone_photos_with_several_pictures_are_ordinary(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (16, 8), "red").save(path, format="MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))])
    with Image.open(path) as image:
        assert image.format == "MPO"
    assert np.abs(pixels(path).astype(int) - (255, 0, 0)).max() <= 2
    assert examine(path).warnings == () and (examine(path).width, examine(path).height) == (16, 8)


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


def _png(width, height, depth, kind, raw):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def _lab():
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def _matrix_profile(gamma):
    """A minimal ICC v2 RGB profile: sRGB's primaries adapted to D50, and one gamma."""
    def s15(*values):
        return b"".join(struct.pack(">i", round(v * 65536)) for v in values)

    def xyz(*values):
        return b"XYZ \0\0\0\0" + s15(*values)

    text = b"test"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text) + 1) + text + b"\0" + bytes(4 + 4 + 2 + 1 + 67),
        b"cprt": b"text\0\0\0\0none\0\0\0\0",
        b"wtpt": xyz(0.9642, 1.0, 0.8249),
        b"rXYZ": xyz(0.43607, 0.22249, 0.01392),
        b"gXYZ": xyz(0.38515, 0.71687, 0.09708),
        b"bXYZ": xyz(0.14307, 0.06061, 0.71410),
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"),
                        b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"),
    }  # fmt: skip
    offset, table, body = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        data += b"\0" * (-len(data) % 4)
        table += name + struct.pack(">II", offset + len(body), len(data))
        body += data
    size = offset + len(body)
    header = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02100000, b"mntr", b"RGB ", b"XYZ ") + bytes(12) + b"acsp"
    header += bytes(28) + s15(0.9642, 1.0, 0.8249)
    return header + bytes(128 - len(header)) + table + body

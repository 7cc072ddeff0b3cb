"""Every mode that pictures come in, drawn here, and the pixels that a person sees."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from trainer.data.colour import opacity
from trainer.data.images import examine, load_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)
SRGB_TO_D50 = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])
P3_TO_D50 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
D50 = np.array([0.9642, 1.0, 0.8249])


def pixels(path, background="#ffffff"):
    image = load_image(path, background)
    assert image.mode == "RGB"
    found = examine(path)
    assert (found.width, found.height) == image.size
    return np.asarray(image)


def srgb_of(light):
    """sRGB 0..255 of linear light with its primaries."""
    light = np.clip(light, 0, 1)
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055) * 255


def light_of(srgb):
    value = np.asarray(srgb) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def tiff(path, values, **tags):
    """A TIFF of one strip, written by hand: for kinds that Pillow reads and does not write."""
    numbers = {"width": 256, "height": 257, "bits": 258, "compression": 259, "photometric": 262, "offset": 273,
               "samples": 277, "rows": 278, "count": 279, "format": 339}  # fmt: skip
    data = values if isinstance(values, bytes) else np.ascontiguousarray(values).tobytes()
    fields = {"bits": 8, "compression": 1, "photometric": 1, "samples": 1, "format": 1, **tags}
    fields |= {"rows": fields["height"], "count": len(data), "offset": 8}
    start = 8 + len(data) + len(data) % 2
    entries = sorted((numbers[name], value) for name, value in fields.items())
    table = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", n, 4, 1, v) for n, v in entries)
    path.write_bytes(b"II*\0" + struct.pack("<I", start) + data + b"\0" * (len(data) % 2) + table + bytes(4))
    return path


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


def _png(width, height, depth, kind, raw):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def _lab():
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def test_deep_tiffs_of_every_kind(tmp_path):
    ramp = np.arange(256, dtype=np.int64).reshape(16, 16)
    size = {"width": 16, "height": 16}
    path = tmp_path / "a.tif"
    white_is_zero = tiff(path, (65535 - ramp * 257).astype("<u2"), bits=16, photometric=0, **size)
    assert (pixels(white_is_zero) == ramp[..., None]).all()
    tiff(path, (ramp * 257 - 32768).astype("<i2"), bits=16, format=2, **size)  # signed: its darkest is black
    assert (pixels(path) == ramp[..., None]).all()
    tiff(path, (ramp * 0x01010101).astype("<u4"), bits=32, **size)
    assert (pixels(path) == ramp[..., None]).all()
    twelve = (ramp * 4095 / 255).round().astype(np.int64).reshape(-1, 2)
    packed = np.stack([twelve[:, 0] >> 4, (twelve[:, 0] & 15) << 4 | twelve[:, 1] >> 8, twelve[:, 1] & 255], -1)
    tiff(path, packed.astype(np.uint8), bits=12, **size)
    assert (pixels(path) == ramp[..., None]).all()
    tiff(path, (1 - ramp / 255).astype("<f4"), bits=32, format=3, photometric=0, **size)
    assert (pixels(path) == ramp[..., None]).all()
    Image.fromarray((ramp * 257).astype(">u2")).save(path)  # the other end first
    assert (pixels(path) == ramp[..., None]).all()


def test_floats_that_are_no_numbers(tmp_path):
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    expected = np.arange(256).reshape(16, 16).copy()
    for place, value, seen in (((0, 3), np.nan, 0), ((1, 3), np.inf, 255), ((2, 3), -np.inf, 0)):
        values[place], expected[place] = value, seen
    Image.fromarray(values).save(tmp_path / "a.tiff")
    assert (pixels(tmp_path / "a.tiff") == expected[..., None]).all()
    for value in (np.nan, np.inf, 0.0, -3.0):
        Image.fromarray(np.full((4, 4), value, dtype=np.float32)).save(tmp_path / "flat.tiff")
        assert np.ptp(pixels(tmp_path / "flat.tiff")) == 0


def test_floats_over_one_are_scaled_and_not_clipped(tmp_path):
    for top in (255.0, 65535.0, 1e6):
        ramp = np.linspace(0, top, 256, dtype=np.float32).reshape(16, 16)
        Image.fromarray(ramp).save(tmp_path / "a.tiff")
        assert (pixels(tmp_path / "a.tiff") == np.arange(256).reshape(16, 16, 1)).all()


@pytest.mark.parametrize("background", ["#ffffff", "#000000", "#20c0f1"])
def test_transparency_is_over_the_background(tmp_path, background):
    behind = np.array([int(background[i : i + 2], 16) for i in (1, 3, 5)])
    alpha = RNG.integers(0, 256, (6, 9), dtype=np.uint8)
    weight = alpha[..., None] / 255
    expected = PIXELS * weight + behind * (1 - weight)
    for name, options in (("a.png", {}), ("a.webp", {"lossless": True, "exact": True}), ("a.tiff", {})):
        Image.fromarray(np.dstack([PIXELS, alpha])).save(tmp_path / name, **options)
        assert np.abs(pixels(tmp_path / name, background) - expected).max() <= 1
        assert examine(tmp_path / name).has_alpha
        with Image.open(tmp_path / name) as image:
            assert (np.asarray(opacity(image)) == alpha).all()
    grey = np.dstack([PIXELS[..., 0], alpha])
    Image.fromarray(grey).save(tmp_path / "la.png")
    expected = PIXELS[..., :1] * weight + behind * (1 - weight)
    assert np.abs(pixels(tmp_path / "la.png", background) - expected).max() <= 1
    palette = Image.new("PA", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putdata([(0, 255), (1, 0)])
    palette.convert("RGBA").save(tmp_path / "pa.png")
    assert pixels(tmp_path / "pa.png", background).tolist() == [[[255, 0, 0], behind.tolist()]]


def test_opaque_pictures_have_no_alpha(tmp_path):
    opaque = np.dstack([PIXELS, np.full((6, 9), 255, np.uint8)])
    Image.fromarray(opaque).save(tmp_path / "rgba.png")
    Image.fromarray(PIXELS).quantize(4).save(tmp_path / "unused.png", transparency=200)
    Image.fromarray(PIXELS).save(tmp_path / "rgb.png", transparency=(1, 1, 1))
    Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png", transparency=3)
    for path in tmp_path.iterdir():
        assert not examine(path).has_alpha, path
        pixels(path)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr",
                                  "LAB", "HSV", "I", "F", "I;16"])  # fmt: skip
def test_any_mode_of_pillow_can_be_shown(mode):
    from trainer.data.colour import to_rgb

    if mode in ("F", "I", "I;16"):
        image = Image.fromarray(PIXELS[..., 0].astype({"F": np.float32, "I": np.int32, "I;16": np.uint16}[mode]))
    elif mode == "LAB":
        image = ImageCms.applyTransform(Image.fromarray(PIXELS), ImageCms.buildTransform(
            ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB"))  # fmt: skip
    else:
        through = {"La": "LA", "RGBa": "RGBA", "PA": "P"}.get(mode)
        image = Image.fromarray(PIXELS).convert(through) if through else Image.fromarray(PIXELS)
        image = image.convert(mode)
    assert image.mode == mode
    seen = to_rgb(image)
    assert seen.mode == "RGB" and seen.size == image.size
    if mode in ("RGB", "RGBA", "RGBa", "RGBX"):
        assert (np.asarray(seen) == PIXELS).all()
    if mode in ("CMYK", "YCbCr", "LAB", "HSV"):  # 8 bits of theirs are fewer colours than 8 of ours
        assert np.abs(np.asarray(seen).astype(int) - PIXELS).mean() <= 2


def test_display_p3_is_converted_to_srgb(tmp_path):
    """Against the colorimetry, for colours that sRGB has: a phone's photo looks as on the phone."""
    colours = RNG.integers(60, 200, (8, 8, 3), dtype=np.uint8)
    profile = _matrix_profile(gamma=2.2, matrix=P3_TO_D50)
    expected = srgb_of((colours / 255) ** 2.2 @ (np.linalg.inv(SRGB_TO_D50) @ P3_TO_D50).T)
    assert np.abs(expected - colours).max() > 15
    for name, options in (("a.png", {}), ("a.tiff", {}), ("a.webp", {"lossless": True})):
        Image.fromarray(colours).save(tmp_path / name, icc_profile=profile, **options)
        assert np.abs(pixels(tmp_path / name) - expected).max() <= 2
    # The background is sRGB, and is laid behind what is already converted.
    clear = np.dstack([colours, np.zeros((8, 8), np.uint8)])
    Image.fromarray(clear).save(tmp_path / "clear.png", icc_profile=profile)
    assert (pixels(tmp_path / "clear.png", "#3c8cc8") == (0x3C, 0x8C, 0xC8)).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_profiles(tmp_path, dtype):
    """Linear grey: its darkest values lie far apart in sRGB, and those of 16 bits must not fall into those of 8."""
    count = 256 if dtype is np.uint8 else 65536
    values = np.arange(count).reshape(16, -1).astype(dtype)
    Image.fromarray(values).save(tmp_path / "a.png", icc_profile=_grey_profile(1.0))
    expected = srgb_of(values / (count - 1))[..., None]
    assert np.abs(pixels(tmp_path / "a.png") - expected).max() <= 2


def test_cmyk_with_a_profile(tmp_path):
    """A printer whose inks are not pure: its colour table's corners, each in a square of 16 pixels."""
    inks = np.array([[0.3, 0.7, 0.9], [0.8, 0.3, 0.5], [0.95, 0.9, 0.3], [0, 0, 0]])  # what each lets through
    corners = np.stack(np.meshgrid(*[[0, 1]] * 4, indexing="ij"), -1).reshape(-1, 4)
    printed = 255 * np.prod(np.where(corners[..., None], inks, 1), axis=1)
    profile = _cmyk_profile(_lab_of(printed))
    stored = np.repeat(np.repeat(corners[None] * 255, 16, 0), 16, 1).astype(np.uint8)
    image, expected = Image.fromarray(stored, "CMYK"), np.repeat(printed[None], 16, 1)
    for name, options in (("a.tiff", {}), ("a.jpg", {"quality": 100, "subsampling": 0})):
        image.save(tmp_path / name, icc_profile=profile, **options)
        seen = pixels(tmp_path / name).astype(float)
        assert np.abs(seen - expected).max() <= 2, name
    image.save(tmp_path / "plain.tiff")
    assert np.abs(pixels(tmp_path / "plain.tiff").astype(float) - expected).max() > 25  # so the profile was used


def _lab_of(srgb):
    ratio = light_of(srgb) @ SRGB_TO_D50.T / D50
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def _profile(kind, space, connection, tags):
    """An ICC v2 profile of these tags."""
    text = b"test"
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text) + 1) + text + b"\0" + bytes(4 + 4 + 2 + 1 + 67),
        b"cprt": b"text\0\0\0\0none\0\0\0\0",
        b"wtpt": _xyz(D50),
        **tags,
    }
    offset, table, body = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, data in tags.items():
        data += b"\0" * (-len(data) % 4)
        table += name + struct.pack(">II", offset + len(body), len(data))
        body += data
    header = struct.pack(">I4sI4s4s4s", offset + len(body), b"lcms", 0x02100000, kind, space, connection)
    header += bytes(12) + b"acsp" + bytes(28) + _s15(D50)
    return header + bytes(128 - len(header)) + table + body


def _s15(values):
    return b"".join(struct.pack(">i", round(v * 65536)) for v in values)


def _xyz(values):
    return b"XYZ \0\0\0\0" + _s15(values)


def _gamma(value):
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256)) + b"\0\0"


def _matrix_profile(gamma, matrix=SRGB_TO_D50):
    primaries = dict(zip((b"rXYZ", b"gXYZ", b"bXYZ"), map(_xyz, matrix.T), strict=True))
    return _profile(b"mntr", b"RGB ", b"XYZ ", primaries | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _gamma(gamma)))


def _grey_profile(gamma):
    return _profile(b"mntr", b"GRAY", b"XYZ ", {b"kTRC": _gamma(gamma)})


def _cmyk_profile(corners):
    """A printer's profile with a table of two steps a side: Lab [16, 3], the first ink changing slowest."""
    codes = np.stack([corners[:, 0] * 65280 / 100, (corners[:, 1] + 128) * 256, (corners[:, 2] + 128) * 256], -1)
    straight = struct.pack(">HH", 0, 65535)
    table = b"mft2\0\0\0\0" + bytes([4, 3, 2, 0]) + _s15(np.eye(3).ravel()) + struct.pack(">HH", 2, 2)
    table += straight * 4 + codes.round().astype(">u2").tobytes() + straight * 3
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"A2B0": table})

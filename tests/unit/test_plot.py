"""Loss curves and sheets, looked at as pixels."""

import sys

import numpy as np
import pytest
from PIL import Image

from trainer.plot import draw_losses, save_png, sheet, smoothed

BLUE, ORANGE = (0x1F, 0x4E, 0x9E), (0xC8, 0x50, 0x1E)


def count(image, colour):
    return int((np.abs(np.asarray(image).astype(int) - colour).max(-1) < 12).sum())


def test_smoothing():
    assert smoothed([(1, 2.0), (2, 4.0)], 0) == [(1, 2.0), (2, 4.0)]
    assert smoothed([(1, 2.0), (2, 4.0)], 0.5) == [(1, 2.0), (2, pytest.approx((0.25 * 2 + 0.5 * 4) / 0.75))]
    assert smoothed([(i, 3.0) for i in range(9)], 0.9)[-1][1] == pytest.approx(3)
    assert smoothed([(1, 2.0), (2, float("nan")), (3, None), (4, 2.0)], 0.9) == [(1, 2.0), (4, pytest.approx(2.0))]
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="smoothing"):
            smoothed([], share)


def test_the_line_goes_where_the_losses_go():
    falling = np.asarray(draw_losses([(i, 200.0 - i) for i in range(100)], smoothing=0))
    assert falling.shape == (576, 1024, 3) and falling.dtype == np.uint8
    rows, columns = np.nonzero(np.abs(falling.astype(int) - BLUE).max(-1) < 12)
    inside = rows > 110  # below the legend
    rows, columns = rows[inside], columns[inside]
    assert len(rows) > 300 and np.corrcoef(rows, columns)[0, 1] > 0.99


def test_losses_at_fixed_noise_and_titles_are_drawn():
    points = [(1, 1.0), (2, 0.9), (3, 0.8)]
    plain, more = draw_losses(points), draw_losses(points, evals=[(0, 1.2), (3, 0.7)])
    assert count(plain, ORANGE) == 0 and count(more, ORANGE) > 40
    titled = draw_losses(points, title="hello")
    assert np.asarray(titled).tobytes() != np.asarray(plain).tobytes()


@pytest.mark.parametrize("points", [[(1, 0.5)], [(i, 0.5) for i in range(5)], [(i, 0.0) for i in range(5)],
                                    [(i, 10.0**-i) for i in range(1, 60)]])  # fmt: skip
def test_odd_curves_are_drawn(points):
    assert count(draw_losses(points, size=(400, 300)), BLUE) > 5


def test_nothing_to_draw_and_no_matplotlib(monkeypatch):
    with pytest.raises(ValueError, match="train some steps"):
        draw_losses([])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw_losses([(1, 1.0)])


def test_sheet_shows_every_picture_with_its_label(tmp_path):
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]
    pictures = [Image.new("RGB", (10, 6), c) for c in colours]
    image = sheet(pictures, ["one", "two", "three", "four", "five"], columns=2, title="t", scale=3)
    for colour in colours:
        assert count(image, colour) == 10 * 6 * 9
    other = sheet(pictures, ["one", "two", "three", "four", "six"], columns=2, title="t", scale=3)
    assert image.tobytes() != other.tobytes()
    path = save_png(image, tmp_path / "new" / "a.png")
    assert Image.open(path).tobytes() == image.tobytes() and [p.name for p in path.parent.iterdir()] == ["a.png"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot write"):
        save_png(image, tmp_path / "file" / "a.png")

"""The labelled grid of FluxFFTCompare."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image, ImageFont


@pytest.fixture(scope="module")
def grid() -> ModuleType:
    """The module alone: its package needs ComfyUI."""
    path = Path(__file__).parents[2] / "nodes" / "grid.py"
    spec = importlib.util.spec_from_file_location("grid", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(folder: Path, columns: int, rows: int, size: tuple[int, int]) -> list[list[Path]]:
    made = [[folder / f"{c}-{r}.png" for r in range(rows)] for c in range(columns)]
    for c, column in enumerate(made):
        for r, path in enumerate(column):
            Image.new("RGB", size, (40 * c + 40, 40 * r + 40, 250)).save(path)
    return made


@pytest.mark.parametrize(
    ("size", "side", "shown"), [((256, 192), 0, (256, 192)), ((512, 256), 256, (256, 128)), ((64, 64), 0, (192, 192))]
)
def test_every_picture_is_in_its_place(grid, tmp_path, size, side, shown):
    prompts, labels = ["a red circle", "a blue star", "x"], ["parent", "step 250", "average, step 250"]
    made = np.asarray(grid.draw(labels, prompts, files(tmp_path, 3, 3, size), side))
    width, height = shown
    found = {}
    for c in range(3):
        for r in range(3):
            ys, xs = np.nonzero((made == (40 * c + 40, 40 * r + 40, 250)).all(axis=2))
            assert (np.ptp(xs) + 1, np.ptp(ys) + 1, len(xs)) == (width, height, width * height)
            found[c, r] = xs.min(), ys.min()
    assert all(found[c, 0][1] == found[0, 0][1] and found[0, c][0] == found[0, 0][0] for c in range(3))
    assert found[0, 0][0] < found[1, 0][0] < found[2, 0][0] and found[0, 0][1] < found[0, 1][1] < found[0, 2][1]
    # Above the first row: labels, each over its column.
    head = made[: found[0, 0][1]]
    for c in range(3):
        left = found[c, 0][0]
        assert (head[:, left : left + width] > 150).any()


def test_long_prompts_are_wrapped_and_cut(grid, tmp_path):
    pictures = files(tmp_path, 2, 1, (256, 256))
    short = grid.draw(["a", "b"], ["word"], pictures)
    long = grid.draw(["a", "b"], ["word " * 500], pictures)
    endless = grid.draw(["a", "b" * 300], ["w" * 3000], pictures)
    assert short.width == long.width == endless.width
    assert short.height < long.height < short.height + 100 and endless.height == short.height


def test_prompts_of_any_script_and_an_old_pillow_are_no_error(grid, tmp_path, monkeypatch):
    pictures = files(tmp_path, 1, 2, (64, 64))
    prompts = ["\u4e00\u53ea\u732b \U0001f600", "caf\u00e9 \u0416\u0443\u043a"]
    assert grid.draw(["parent"], prompts, pictures).width > 160
    plain = ImageFont.load_default_imagefont() if hasattr(ImageFont, "load_default_imagefont") else None
    if plain is None:
        pytest.skip("this Pillow has no font of one size")
    monkeypatch.setattr(ImageFont, "load_default", lambda: plain)
    assert grid.draw(["parent"], prompts, pictures).width > 160

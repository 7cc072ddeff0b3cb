"""One grid of pictures over the parent, what a run has kept, and the run as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.comfyui.graphs import demo, start, train, with_previews
from tests.comfyui.server import Graph, Node, Server

PROMPTS = "a red circle\na blue star"


def pixels(server: Server, node: str, result: Any) -> np.ndarray:
    """The grid that a node showed."""
    (image,) = result.outputs[node]["images"]
    root = server.base / ("output" if image["type"] == "output" else "temp")
    return np.asarray(Image.open(root / image["subfolder"] / image["filename"]).convert("RGB"))


def cells(grid: np.ndarray, columns: int, side: int = 192, gap: int = 4) -> list[list[np.ndarray]]:
    """The pictures in a grid of the demo's, by row and column: found by where rows of the background end."""
    assert grid.shape[1] == gap + columns * (side + gap)
    found, y = [], grid.shape[0] - gap
    while y >= side and len(found) < 2:
        found.insert(0, [grid[y - side : y, gap + i * (side + gap) :][:, :side] for i in range(columns)])
        y -= side + 1
        while y > 0 and grid[y - 1, -gap - 1].tolist() == [24, 24, 28]:
            y -= 1
    return found


def compared(g: Graph, run: Node | list, previews: Node, **inputs: Any) -> Node:
    return g.add("FluxFFTCompare", run=run, previews=previews,
                 **{"steps": "all", "parent": True, "average": False, "cell_side": 0, **inputs})


def test_a_grid_of_the_parent_the_steps_on_the_way_and_the_run(server: Server) -> None:
    if not server.install.at_least(0, 9, 0):
        pytest.skip("ComfyUI before 0.9 hard-codes Flux's width, so it cannot load the tiny parent")
    g = Graph()
    parts = demo(g)
    settings = with_previews(g, every=4, prompts=PROMPTS)
    recipe = {"batch_size": 16, "checkpoint_every_steps": 6, "ema_decay": 0.9}
    told = server.get("/object_info/FluxFFTRecipe")["FluxFFTRecipe"]["input"]
    defaults = {name: spec[1].get("default", spec[0][0] if isinstance(spec[0], list) else None)
                for kind in ("required", "optional") for name, spec in told.get(kind, {}).items()}
    made = g.add("FluxFFTRecipe", **{**defaults, **recipe})
    run = start(g, parts._replace(recipe=made.out(0)), "grid")
    trained = g.add("FluxFFTTrainSteps", run=run, steps=9, previews=settings)
    grid = compared(g, trained, settings, average=True)
    result = server.run(g, seconds=300)
    assert not result.error, result.error
    assert result.text(grid) == "6 columns: parent, step 4, step 6, step 8, step 9, average, step 9"
    pictures = pixels(server, grid, result)
    rows = cells(pictures, 6)
    for row in rows:
        assert all(not np.array_equal(a, b) for i, a in enumerate(row) for b in row[:i]), "each its own"
    for column in range(6):
        assert not np.array_equal(rows[0][column], rows[1][column])
    # Those on the way are the previews themselves, sharply enlarged.
    for step, column in ((4, 1), (8, 3)):
        for i in (0, 1):
            (file,) = (server.home / "grid/samples").glob(f"step-{step:06d}_0{i}_*.png")
            assert np.array_equal(rows[i][column][1::3, 1::3], np.asarray(Image.open(file).convert("RGB")))
    # The parent is what an untrained run shows: the same prompts and noise over the same weights.
    other = Graph()
    untrained = other.add("FluxFFTPreview", run=start(other, demo(other), "untrained"),
                          previews=with_previews(other, prompts=PROMPTS))
    shown = server.run(other)
    assert not shown.error, shown.error
    for i, image in enumerate(shown.outputs[untrained]["images"]):
        found = np.asarray(Image.open(server.base / image["type"] / image["subfolder"] / image["filename"]))
        assert np.abs(found.astype(int) - rows[i][0][1::3, 1::3]).max() <= 2
    # Nothing is sampled anew, and what training reports as the newest pictures is not the parent's.
    before = {p.name: p.stat().st_mtime_ns for p in (server.home / "grid/samples").rglob("*.png")}
    g[grid]["inputs"]["steps"] = "6"
    again = server.run(g)
    assert again.text(grid) == "4 columns: parent, step 6, step 9, average, step 9"
    after = {p.name: p.stat().st_mtime_ns for p in (server.home / "grid/samples").rglob("*.png")}
    assert {n: t for n, t in after.items() if n in before} == before and len(after) == len(before) + 1
    assert [e["step"] for e in server.events("grid") if e["type"] == "sample"] == [4, 4, 8, 8, 9, 9]


@pytest.mark.parametrize(("steps", "word"), [("7", "steps has 7"), ("two", "steps has 'two'"), ("0", "steps has '0'")])
def test_steps_that_are_not_there_are_told(server: Server, steps: str, word: str) -> None:
    g = Graph()
    settings = with_previews(g, prompts="a red circle")
    grid = compared(g, train(g, demo(g), "few", 2), settings, steps=steps, parent=False)
    refused = server.run(g)
    assert refused.error_node == grid and word in refused.error and "\n" not in refused.error


def test_the_run_alone_and_an_average_that_is_not_there(server: Server) -> None:
    """Without parent and steps nothing but the run is sampled: old versions of ComfyUI can do that at any width."""
    g = Graph()
    settings = with_previews(g, prompts="a red circle")
    grid = compared(g, train(g, demo(g), "alone", 2), settings, steps="", parent=False)
    result = server.run(g)
    assert not result.error, result.error
    assert result.text(grid) == "1 column: step 2"
    assert cells(pixels(server, grid, result), 1)[0][0].shape == (192, 192, 3)
    g[grid]["inputs"]["average"] = True
    assert "keeps no average" in server.run(g).error
    moved = server.home / "demo/flux_demo.safetensors"
    hidden = moved.rename(moved.with_suffix(".hidden"))
    g[grid]["inputs"] |= {"average": False, "parent": True}
    try:
        told = server.run(g)
        assert told.error.startswith("parent") and "\n" not in told.error and told.error_node == grid
    finally:
        hidden.rename(moved)


def test_pictures_are_made_as_small_as_asked(server: Server, tmp_path: Path) -> None:
    g = Graph()
    settings = with_previews(g, prompts="a red circle")
    grid = compared(g, train(g, demo(g), "small", 1), settings, steps="", parent=False, cell_side=32)
    result = server.run(g)
    # Half as large, and enlarged five times to have room for its label.
    assert not result.error and pixels(server, grid, result).shape[1] == 4 + 160 + 4

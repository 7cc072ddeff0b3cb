"""Datasets on the canvas: several folders and their settings, what the nodes say, and edits that are noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.comfyui.server import Graph, Server


def folder(server: Server, name: str) -> Path:
    """Four of the drawings in a folder of ComfyUI's input folder."""
    target = server.base / "input" / name
    target.mkdir()
    for path in sorted((server.base / "demo_files/drawings").iterdir())[:8]:
        shutil.copy(path, target / path.name)
    return target


def graph(name: str, steps: int = 2, pictures: dict[str, Any] | None = None, captions: dict[str, Any] | None = None,
          also: str = "") -> Graph:  # fmt: skip
    g = Graph()
    model = g.add("FluxFFTModel", flux="flux_demo.safetensors", clip_l="demo_captions.safetensors",
                  t5="demo_captions.safetensors", vae="demo_vae.safetensors")
    plain: dict[str, Any] = {"resolution": 64, "trigger_word": "", "bucket_step": 16, "upscale": True}
    links: dict[str, Any] = {}
    if pictures is not None:
        links["pictures"] = g.add("FluxFFTPictureSettings", **{
            "more_resolutions": "", "crop": "centre", "flip": False, "alpha": "background", "background": "#ffffff",
            "animations": "first frame", "masks": True, "outside_mask": 0.0, "repeats": 1, "weight": 1.0,
            "validation_share": 0.0, "validation_folder": "", **pictures})  # fmt: skip
    if captions is not None:
        links["captions"] = g.add("FluxFFTCaptionSettings", **{
            "caption_prefix": "", "caption_suffix": "", "missing_captions": "trigger or name", "fixed_caption": "",
            "caption_lines": "join", "shuffle_tags": False, "keep_tags": 0, "tag_dropout": 0.0, "caption_variants": 4,
            **captions})  # fmt: skip
    if also:
        links["also"] = g.add("FluxFFTDataset", folder=also, **plain)
    data = g.add("FluxFFTDataset", folder=name, **plain, **links)
    run = g.add("FluxFFTStart", model=model, dataset=data, run_name=name, if_different="stop and ask")
    g.add("FluxFFTTrainSteps", run=run, steps=steps)
    return g


def node(g: Graph, kind: str) -> str:
    return next(key for key in reversed(g) if g[key]["class_type"] == kind)


def manifest(server: Server, name: str) -> dict[str, Any]:
    return json.loads((server.home / name / "dataset.json").read_text())


def test_two_folders_with_settings_of_their_own(placed: Server) -> None:
    first, second = folder(placed, "first"), folder(placed, "second")
    for i in range(6):  # others than the first's
        Image.new("RGB", (64, 64), (i * 40, 0, 99)).save(second / f"plain{i}.png")
    (first / "01_green_circle.txt").write_text("green, circle, " + "word, " * 30)
    held = folder(placed, "held")
    for path in held.glob("0[1-9]*"):
        path.unlink()
    told: list[dict[str, Any]] = []

    pictures = {"flip": True, "repeats": 3, "weight": 0.5, "more_resolutions": "32", "validation_folder": "held"}
    g = graph("first", pictures=pictures,
              captions={"caption_prefix": "ohwx,", "shuffle_tags": True, "caption_variants": 3}, also="second")
    result = placed.run(g, on_message=lambda m: told.append(m) if m["type"] == "flux_fft.said" else None)

    assert not result.error, result.error
    data = manifest(placed, "first")
    mine = [s for s in data["samples"] if s["image"].startswith("first/")]
    others = [s for s in data["samples"] if s["image"].startswith("second/")]
    # The held picture is in both folders: trained in neither.
    assert len(mine) == 3 * 2 and len(others) == 3 + 6
    assert all(s["repeats"] == 3 and s["weight"] == 0.5 and s["flipped"] and len(s["captions"]) == 3 for s in mine)
    assert all(set(s) == {"image", "latent", "shape", "caption"} for s in others)
    assert {s["image"] for s in data["validation"]} == {"held/00_red_circle.png"}
    start, own = result.text(node(g, "FluxFFTStart")), result.text(node(g, "FluxFFTDataset"))
    assert "12 pictures, 2 sizes" in start and "an epoch: 6 steps of up to 5 pictures, 27 in all" in start
    assert "first/01_green_circle.png has a caption of 33 tokens: 16 are read" in start
    assert "measured, never trained: 1 picture" in start and "The cache" in start
    assert "4 usable pictures" in own and "64 x 64 px: 4 pictures (each 3 times an epoch)" in own
    assert "second" not in own
    early = [m["data"] for m in told if m["data"]["node"] == node(g, "FluxFFTStart")]
    assert early and "12 pictures, 2 sizes" in early[0]["lines"] and any("to encode" in x for x in early[0]["lines"])
    losses = [e["loss"] for e in placed.events("first") if e["type"] == "step"]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)


def test_edits_are_noticed_and_train_nothing_by_themselves(placed: Server) -> None:
    edited = folder(placed, "edited")
    g = graph("edited", 2)
    data, start, train = (node(g, f"FluxFFT{kind}") for kind in ("Dataset", "Start", "TrainSteps"))
    assert not placed.run(g).error
    before = manifest(placed, "edited")

    again = placed.run(g)
    assert not {data, start} & set(again.executed), "nothing changed: nothing is looked through again"

    (edited / "00_red_circle.txt").write_text("a crimson circle")
    (edited / ".DS_Store").write_text("the system's own")
    result = placed.run(g)
    assert {data, start} <= set(result.executed) and not result.error
    assert "the pictures changed: 1 caption changed (00_red_circle.png)" in result.text(start)
    assert placed.steps("edited") == [1, 2], "the target is reached: nothing is trained"
    after = manifest(placed, "edited")
    assert [s["caption"] == t["caption"] for s, t in zip(before["samples"], after["samples"], strict=True)] == [
        False, True, True, True]  # fmt: skip

    Image.new("RGB", (64, 64), "navy").save(edited / "new.png")
    g[train]["inputs"]["steps"] = 3
    result = placed.run(g)
    assert "1 picture added (new.png)" in result.text(start) and not result.error
    assert placed.steps("edited") == [1, 2, 3]
    (edited / ".DS_Store").write_text("touched again")
    assert not {data, start} & set(placed.run(g).executed)


def test_a_validation_folder_is_followed_too(placed: Server) -> None:
    folder(placed, "followed")
    held = placed.base / "input" / "followed_held"
    held.mkdir()
    Image.new("RGB", (64, 64), "navy").save(held / "a.png")
    g = graph("followed", 1, pictures={"validation_folder": "followed_held"})
    assert not placed.run(g).error
    assert len(manifest(placed, "followed")["validation"]) == 1
    Image.new("RGB", (64, 64), "teal").save(held / "b.png")
    assert not placed.run(g).error
    assert len(manifest(placed, "followed")["validation"]) == 2


@pytest.mark.parametrize(
    ("kind", "settings", "word"),
    [
        ("FluxFFTPictureSettings", {"more_resolutions": "512, big"}, "more_resolutions"),
        ("FluxFFTPictureSettings", {"more_resolutions": "8"}, "more_resolutions"),
        ("FluxFFTPictureSettings", {"background": "white"}, "#rrggbb"),
        ("FluxFFTCaptionSettings", {"missing_captions": "fixed"}, "fixed_caption"),
        ("FluxFFTStart", {"validation_folder": "/no/such/place"}, "/no/such/place"),
    ],
)
def test_a_bad_setting_is_named_where_it_is(placed: Server, kind: str, settings: dict[str, Any], word: str) -> None:
    captions = settings if kind == "FluxFFTCaptionSettings" else {}
    g = graph("bad", pictures=settings if not captions else {}, captions=captions)
    (placed.base / "input" / "bad").mkdir(exist_ok=True)
    Image.new("RGB", (64, 64)).save(placed.base / "input" / "bad" / "a.png")
    result = placed.run(g)
    assert result.error_node == node(g, kind) and word in result.error and "\n" not in result.error


def test_pictures_without_captions_can_stop_it(placed: Server) -> None:
    stopped = folder(placed, "stopped")
    (stopped / "02_blue_circle.txt").unlink()
    g = graph("stopped", captions={"missing_captions": "stop"})
    result = placed.run(g)
    assert result.error_node == node(g, "FluxFFTStart")
    assert "1 picture in" in result.error and "02_blue_circle.png" in result.error
    assert "skipped: 02_blue_circle.png has no caption file" in result.text(node(g, "FluxFFTDataset"))

"""``python -m trainer scan``: its options are the settings of a dataset, its JSON an account of every file."""

import argparse
import json
import os
from dataclasses import fields

import numpy as np
import pytest
from PIL import Image

from trainer.cli import scan as scan_cli
from trainer.config import DatasetConfig
from trainer.data.folders import state_of


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    scan_cli.add_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


OPTIONS = {
    "resolution": ("--resolution", "512"), "bucket_step": ("--bucket-step", "32"), "upscale": ("--no-upscale",),
    "crop": ("--crop", "focus"), "flip": ("--flip",), "alpha": ("--alpha", "mask"),
    "background": ("--background", "#102030"), "animations": ("--animations", "skip"), "masks": ("--no-masks",),
    "outside_mask": ("--outside-mask", "0.5"), "trigger_word": ("--trigger-word", "ohwx"),
    "fixed_caption": ("--fixed-caption", "a cat"), "missing_captions": ("--missing-captions", "folder"),
    "caption_prefix": ("--caption-prefix", "p,"), "caption_suffix": ("--caption-suffix", ", s"),
    "caption_lines": ("--caption-lines", "random"), "shuffle_tags": ("--shuffle-tags",),
    "keep_tags": ("--keep-tags", "2"), "tag_dropout": ("--tag-dropout", "0.25"),
    "caption_variants": ("--caption-variants", "7"), "repeats": ("--repeats", "3"), "weight": ("--weight", "0.5"),
    "validation_share": ("--validation-share", "0.125"), "validation_folder": ("--validation-folder", "held"),
}  # fmt: skip


def test_every_setting_has_an_option():
    assert set(OPTIONS) | {"folder", "more_resolutions", "also"} == {f.name for f in fields(DatasetConfig)}
    assert scan_cli.config_of(parsed("here")) == DatasetConfig(folder="here")
    for name, option in OPTIONS.items():
        config = scan_cli.config_of(parsed("here", *option))
        changed = {f.name for f in fields(DatasetConfig) if getattr(config, f.name) != f.default} - {"folder"}
        assert changed == {name}, name
    many = scan_cli.config_of(parsed("here", "--resolution", "1024,512", "--flip", "--also", "a", "--also", "b"))
    assert many.more_resolutions == (512,) and [c.folder for c in many.also] == ["a", "b"]
    assert all(c.flip and c.more_resolutions == (512,) and c.also == () for c in many.also)


@pytest.mark.parametrize("arguments", [
    ("--resolution", "big"), ("--resolution", ""), ("--crop", "left"), ("--background", "white"), ("--repeats", "0"),
    ("--missing-captions", "fixed"), ("--batch-size", "0"), ("--validation-share", "0.9"), ("--weight", "nan"),
])  # fmt: skip
def test_a_bad_option_is_one_line(tmp_path, arguments, capsys):
    with pytest.raises(ValueError) as caught:
        scan_cli.main(parsed(tmp_path, *arguments))
    assert "\n" not in str(caught.value) and capsys.readouterr().out == ""


@pytest.fixture
def folder(tmp_path):
    """Of every kind one: pictures, captions of all sorts, masks, a table, a damaged picture, other files."""
    folder = tmp_path / "pictures"
    (folder / "masks").mkdir(parents=True)
    for i, name in enumerate(["txt", "caption", "json", "row", "none", "trained", "same"]):
        pixels = np.random.default_rng(min(i, 5)).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    Image.new("L", (64, 64), 128).save(folder / "masks" / "txt.png")
    Image.new("L", (64, 64), 128).save(folder / "lost.mask.png")
    texts = {"txt.txt": "one", "caption.caption": "two", "json.json": '{"caption": "three"}', "broken.png": "text",
             "metadata.jsonl": '{"file_name": "row.png", "text": "four"}', "notes.md": "", "trained.txt": "five, six",
             "same.txt": "five, six"}  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_the_json_accounts_for_every_file(folder, capsys):
    assert scan_cli.main(parsed(folder, "--resolution", 64, "--json", "--batch-size", 4, "--shuffle-tags")) == 0
    out = capsys.readouterr().out
    assert out.isascii() and out.count("\n") == 1
    data = json.loads(out)
    files = sum(len(names) for _, _, names in os.walk(folder))
    assert data["images"] + data["ignored"] == files
    assert (data["images"], data["usable"], data["masks"], data["duplicates"]) == (8, 7, 2, 1)
    assert [s["path"] for s in data["skipped"]] == ["broken.png"]
    assert data["caption_sources"] == {"file": 5, "table": 1, "name": 1}
    assert data["captions"]["row.png"] == "four" and data["captions"]["none.png"] == "none"
    assert data["masked"] == {"txt.png": str(folder / "masks" / "txt.png")}
    assert set(data["caption_variants"]["trained.png"]) == {"five, six", "six, five"}
    assert data["buckets"] == [{"width": 64, "height": 64, "count": 7}] and data["steps_per_epoch"] == 2
    warned = {w["path"]: w["what"] for w in data["warnings"]}
    assert "no picture is called so" in warned["lost.mask.png"]
    assert "same file as same.png" in warned["trained.png"]


def test_the_table_says_what_is_trained(folder, capsys):
    held = folder.parent / "held"
    held.mkdir()
    Image.new("RGB", (64, 64), "red").save(held / "a.png")
    assert scan_cli.main(parsed(folder, "--resolution", "64,32", "--repeats", 3, "--validation-folder", held)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}, {held}: 7 usable pictures, 1 skipped, 9 other files (2 masks among them)"
    assert all(f"  {n} x {n} px: 7 pictures (each 3 times an epoch)" in lines for n in (64, 32))
    assert "  measured, never trained: 1 picture" in lines
    assert "  captions: from files (5), words of the file's name (2), from tables (1)" in lines
    copy = "pictures/trained.png is the same file as pictures/same.png: it is trained twice as often"
    assert f"  warning: {copy}" in lines
    assert "  an epoch: 10 steps of up to 5 pictures, 42 in all" in lines
    assert any(line.startswith("  skipped: pictures/broken.png") for line in lines)


def test_stop_is_told_after_the_account(folder, capsys):
    with pytest.raises(ValueError, match=r"^1 picture in .* has no caption \(none.png\): write"):
        scan_cli.main(parsed(folder, "--missing-captions", "stop", "--json"))
    data = json.loads(capsys.readouterr().out)
    assert data["usable"] == 6 and {"broken.png", "none.png"} == {s["path"] for s in data["skipped"]}


def test_the_state_of_a_folder_changes_with_its_files(folder):
    first = state_of(str(folder))
    assert first and state_of(f'"{folder}"') == first == state_of(str(folder))
    states = [first]

    def changed():
        states.append(state_of(str(folder)))
        assert len(set(states)) == len(states)

    (folder / "txt.txt").write_text("two", encoding="utf-8")  # of the same length
    os.utime(folder / "txt.txt", (1, 1))
    changed()
    (folder / "new.png").write_bytes(b"")
    changed()
    (folder / "new.png").rename(folder / "other.png")
    changed()
    (folder / "other.png").unlink()
    (folder / ".thumbs").mkdir()
    (folder / ".thumbs" / "a.png").write_bytes(b"x")
    (folder / "Thumbs.db").write_bytes(b"x")
    assert state_of(str(folder)) == states[1]
    assert state_of(str(folder / "none")) == ""

"""What is said of many files at once: once for each thing, with a number and the first names."""

import numpy as np
import pytest
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data.folders import list_folder
from trainer.data.grouped import grouped
from trainer.data.report import table
from trainer.data.scan import survey


def draw(path, seed, size=(64, 64), **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def warned(report):
    return [line.removeprefix("  warning: ") for line in table(report) if line.startswith("  warning: ")]


def test_one_line_for_each_thing_whatever_the_number_of_sizes_and_folders(tmp_path):
    for i in range(16):
        draw(tmp_path / "a" / f"{i}.png", i)
        (tmp_path / "a" / f"{i}.txt").write_text("x")
    draw(tmp_path / "b" / "other.png", 99)
    (tmp_path / "b" / "other.txt").write_text("x")
    config = DatasetConfig(folder=str(tmp_path / "a"), resolution=512, more_resolutions=(256, 768),
                           also=(DatasetConfig(folder=str(tmp_path / "b"), resolution=512),))  # fmt: skip
    report = survey(config)
    assert len(report.warnings) == 16 * 3 + 1, "each of them for those who want them all"
    assert warned(report) == ["17 pictures (a/0.png, a/1.png, a/2.png and 14 more) are enlarged more than 2 times,"
                              " which makes them soft"]  # fmt: skip
    assert "a/0.png, a/1.png, a/2.png, a/3.png, a/4.png and 12 more" in "\n".join(table(report, named=5))


def test_what_is_said_of_one_is_said_as_it_is():
    assert grouped([("a.png", "is an empty file")]) == ["a.png is an empty file"]
    twice = [("a.png", f"is 96 x 96 px and is enlarged {n}.0 times") for n in (3, 5)]
    assert grouped(twice) == ["a.png is 96 x 96 px and is enlarged 3.0 times"]


def test_the_most_frequent_comes_first_and_four_names_are_all_told():
    said = [("a", "is an empty file"), *((name, "is a camera RAW: develop it") for name in "bcde")]
    assert grouped(said) == ["4 pictures (b, c, d, e) are camera RAWs: develop them and save them as PNG or JPEG",
                             "a is an empty file"]  # fmt: skip


def test_what_has_no_words_for_many_is_told_of_the_first():
    said = [(f"{i}.png", f"has {i + 1} odd chunks") for i in range(7)]
    told = "7 files (0.png, 1.png, 2.png and 4 more): the first has 1 odd chunks, the others likewise"
    assert grouped(said) == [told]


@pytest.mark.parametrize("policy, words", [
    ("trigger or name", "have no caption file: trained with their names' words"),
    ("folder", "have no caption file: trained with their folder's name"),
    ("fixed", "have no caption file: trained with the fixed caption"),
    ("skip", "have no caption: left out by choice"),
])  # fmt: skip
def test_every_usual_thing_has_words_for_many(tmp_path, policy, words):
    """Of each kind two: nothing of what a scan says is told as of the first and 'the others likewise'."""
    for i in (1, 2):
        draw(tmp_path / f"plain{i}.png", i)
        draw(tmp_path / f"copy{i}.png", 10)
        draw(tmp_path / f"wide{i}.png", 20 + i, (640, 64))
        draw(tmp_path / f"small{i}.png", 30 + i, (16, 16))
        draw(tmp_path / f"latin{i}.png", 40 + i)
        draw(tmp_path / f"lost{i}.mask.png", 50)
        frames = [Image.new("RGB", (64, 64), (i, 0, n)) for n in (0, 99)]
        frames[0].save(tmp_path / f"moving{i}.gif", save_all=True, append_images=frames[1:])
        for name in ("copy", "wide", "small", "moving"):
            (tmp_path / f"{name}{i}.txt").write_text("x")
        (tmp_path / f"latin{i}.txt").write_bytes(b"caf\xe9")
        (tmp_path / f"empty{i}.png").write_bytes(b"")
        (tmp_path / f"raw{i}.nef").write_bytes(b"II*\0")
        (tmp_path / f"alone{i}.txt").write_text("x")
        (tmp_path / f"PLAIN{i}.txt").write_text("x")
        (tmp_path / f"art{i}.psd").write_bytes(b"8BPS")
        (tmp_path / f"cut{i}.png").write_bytes((tmp_path / f"plain{i}.png").read_bytes()[:2000])
    report = survey(DatasetConfig(folder=str(tmp_path), resolution=64, bucket_step=16, missing_captions=policy,
                                  fixed_caption="y" if policy == "fixed" else ""))  # fmt: skip
    lines = table(report)
    assert not [line for line in lines if "likewise" in line]
    assert sum("2 pictures (plain1.png, plain2.png) " + words in line for line in lines) == 1
    assert any("2 caption files (alone1.txt, alone2.txt) belong to no picture" in line for line in lines)
    assert any("2 caption files (PLAIN1.txt, PLAIN2.txt) are called almost like a picture" in line for line in lines)


def test_caption_files_without_a_picture_are_named(tmp_path):
    draw(tmp_path / "a.png", 1)
    draw(tmp_path / "sub" / "b.png", 2)
    draw(tmp_path / "Caf\u00e9 1.png", 3)
    for name in ("a.txt", "a.png.caption", "cat.txt", "sub/a.json", "sub/b.txt", "cafe\u0301_1.txt", "notes.md",
                 ".hidden.txt", "captions.json", "sub/b.jpg.txt", "sub/b.txt.txt", "config.json", "meta_cap.json",
                 "sub/B.json"):  # fmt: skip
        (tmp_path / name).write_text("{}")
    found = dict(list_folder(str(tmp_path)).lone_captions())
    assert sorted(found) == ["cafe\u0301_1.txt", "cat.txt", "sub/B.json", "sub/b.jpg.txt", "sub/b.txt.txt"]
    assert "(b.png almost is)" in found["sub/b.jpg.txt"] and "(b.png almost is)" in found["sub/b.txt.txt"]
    assert found["cat.txt"].endswith("no picture is called so")
    assert "(Caf\u00e9 1.png almost is)" in found["cafe\u0301_1.txt"]
    report = survey(DatasetConfig(folder=str(tmp_path)))
    assert "no picture is called so" in dict(report.warnings)["cat.txt"]
    report = survey(DatasetConfig(folder=str(tmp_path), fixed_caption="one for all"))
    assert not [path for path, _ in report.warnings if path == "cat.txt"], "captions are not asked for"

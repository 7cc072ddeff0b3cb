"""Several folders as one dataset: told apart, split, without a picture on both sides."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data.report import Sample, ScanReport, table
from trainer.data.scan import scan_folder, survey
from trainer.data.sets import combine, parts_of, tell_apart


def draw(path, seed, size=(64, 64), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)


def config(folder, **options):
    return DatasetConfig(**{"folder": str(folder), "resolution": 64, "bucket_step": 16, "trigger_word": "x", **options})


def names(samples):
    return [s.relative for s in samples]


def test_folders_with_settings_of_their_own(tmp_path):
    draw(tmp_path / "one" / "a.png", 1)
    draw(tmp_path / "two" / "a.png", 2)
    draw(tmp_path / "three" / "a.png", 3)
    third = config(tmp_path / "three", repeats=2)
    second = config(tmp_path / "two", resolution=128, repeats=5, weight=0.5, caption_prefix="y", also=(third,))
    calls = []
    report = scan_folder(config(tmp_path / "one", also=(second,)), lambda *a: calls.append(a))
    assert names(report.samples) == ["one/a.png", "two/a.png", "three/a.png"]
    assert [(s.bucket, s.caption, s.config.repeats, s.config.weight) for s in report.samples] == [
        ((64, 64), "x", 1, 1.0), ((128, 128), "y x", 5, 0.5), ((64, 64), "x", 2, 1.0)]  # fmt: skip
    assert report.steps_per_epoch(5) == 2
    assert calls[-1] == (3, 3)
    assert report.as_dict()["usable"] == 3 and "one" in report.folder and "three" in report.folder


def test_names_that_tell_folders_apart(tmp_path):
    for place in ("a/photos", "b/photos", "b/art"):
        (tmp_path / place).mkdir(parents=True)
    a, b, art = (str(tmp_path / place) for place in ("a/photos", "b/photos", "b/art"))
    assert tell_apart([a]) == [""]
    assert tell_apart([a, art]) == ["photos/", "art/"]
    assert tell_apart([a, b, art]) == ["a/photos/", "b/photos/", "art/"]
    assert tell_apart([a, a, f'"{a}"']) == ["photos/", "photos (2)/", "photos (3)/"]


def test_duplicates_by_bytes_and_by_pixels(tmp_path):
    draw(tmp_path / "a.png", 1)
    draw(tmp_path / "b.png", 2)
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes())
    draw(tmp_path / "d.bmp", 1)
    draw(tmp_path / "e.webp", 1, lossless=True)
    draw(tmp_path / "f.png", 1, size=(80, 80))
    report = scan_folder(config(tmp_path))
    assert report.duplicates == 3
    said = {path: what for path, what in report.warnings if "4 times as often" in what}
    assert said["c.png"].startswith("is the same file as a.png")
    assert said["d.bmp"].startswith("has the same pixels as a.png")
    assert said["e.webp"].startswith("has the same pixels as a.png")
    assert sorted(said) == ["c.png", "d.bmp", "e.webp"]
    told = "3 pictures (c.png, d.bmp, e.webp) are copies of others: those are trained more often"
    assert f"  warning: {told}" in table(report)


def test_pictures_that_only_look_alike_when_small_are_no_duplicates(tmp_path):
    base = np.zeros((160, 160, 3), dtype=np.uint8)
    Image.fromarray(base).save(tmp_path / "a.png")
    base[3, 3] = 1  # between the points of a thumbnail
    Image.fromarray(base).save(tmp_path / "b.png")
    report = scan_folder(config(tmp_path))
    assert len({s.thumbnail for s in report.samples}) == 1, "the case is met"
    assert report.duplicates == 0


def sample(name, identity, share_folder="."):
    return Sample(path=name, relative=name, width=64, height=64, bucket=(64, 64), captions=(name,), source="file",
                  content_hash=identity, thumbnail=identity, has_alpha=False, mask="", mask_hash="",
                  config=DatasetConfig(folder=share_folder))  # fmt: skip


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_no_content_is_on_both_sides(data, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    folders = [root / f"set{i}" for i in range(data.draw(st.integers(1, 3)))]
    main = None
    reports = []
    for folder in reversed(folders):
        folder.mkdir(exist_ok=True)
        share = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
        main = DatasetConfig(folder=str(folder), validation_share=share, also=(main,) if main else ())
    assert main is not None
    parts = list(parts_of(main))
    for part in parts:
        contents = data.draw(st.lists(st.integers(0, 12), max_size=12))
        reports.append(ScanReport(folder=part.config.folder, samples=[
            sample(f"{i}.png", f"{c:064x}") for i, c in enumerate(contents)]))  # fmt: skip
    total = combine(parts, reports, lambda: None)
    trained, measured = ({s.content_hash for s in side} for side in (total.samples, total.validation))
    everything = {s.content_hash for r in reports for s in r.samples}
    assert not trained & measured and trained | measured == everything
    assert len(total.samples) + len(total.validation) == sum(len(r.samples) for r in reports)
    assert bool(trained) == bool(everything)
    asked = {s.content_hash for p, r in zip(parts, reports, strict=True) if p.share > 0 for s in r.samples}
    assert measured <= asked and bool(measured) == (bool(asked) and len(everything) > 1)


def test_a_share_is_split_by_content_and_stays(tmp_path):
    for i in range(60):
        draw(tmp_path / f"{i}.png", i)
    report = scan_folder(config(tmp_path, validation_share=0.25))
    measured = {s.content_hash for s in report.validation}
    assert 6 <= len(measured) <= 25 and len(report.samples) + len(report.validation) == 60
    for i in range(30):  # others come, names change: those that are measured stay
        os.rename(tmp_path / f"{i}.png", tmp_path / f"new{i}.png")
        draw(tmp_path / f"more{i}.png", 1000 + i)
    again = {s.content_hash for s in scan_folder(config(tmp_path, validation_share=0.25)).validation}
    assert measured <= again
    assert report.as_dict()["validation"] == sorted(names(report.validation), key=lambda n: int(n[:-4]))


def test_a_small_share_of_few_pictures_is_one(tmp_path):
    for i in range(3):
        draw(tmp_path / f"{i}.png", i)
    report = scan_folder(config(tmp_path, validation_share=0.01))
    assert (len(report.samples), len(report.validation)) == (2, 1)
    for i in (1, 2):
        os.remove(tmp_path / f"{i}.png")
    report = scan_folder(config(tmp_path, validation_share=0.5))
    assert (len(report.samples), len(report.validation)) == (1, 0)


def test_a_validation_folder_takes_its_pictures_out_of_the_training(tmp_path):
    for i in range(4):
        draw(tmp_path / "train" / f"{i}.png", i)
    draw(tmp_path / "train" / "held" / "copy.bmp", 2)  # the pixels of 2.png, inside the training folder
    report = scan_folder(config(tmp_path / "train", validation_folder=str(tmp_path / "train" / "held"), repeats=3))
    assert names(report.samples) == ["train/0.png", "train/1.png", "train/3.png"]
    assert names(report.validation) == ["held/copy.bmp"]
    assert dict(report.skipped) == {
        name: "is in the validation folder too, as held/copy.bmp: measured, not trained"
        for name in ("train/2.png", "train/held/copy.bmp")}  # fmt: skip
    assert report.validation[0].config.repeats == 1
    with pytest.raises(ValueError, match="no usable picture"):
        scan_folder(config(tmp_path / "train" / "held", validation_folder=str(tmp_path / "train")))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    draw(tmp_path / "a.png", 1)
    for options in ({"also": (config(tmp_path / "none"),)}, {"validation_folder": str(tmp_path / "none")}):
        with pytest.raises(ValueError, match="none does not exist"):
            survey(config(tmp_path, **options))


def test_pictures_without_a_caption_stop_the_training_by_choice(tmp_path):
    for i in range(3):
        draw(tmp_path / f"{i}.png", i)
    (tmp_path / "0.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"2 pictures in .* have no caption \(1.png and others\)"):
        scan_folder(config(tmp_path, missing_captions="stop"))
    report = scan_folder(config(tmp_path, missing_captions="skip"))
    assert names(report.samples) == ["0.png"] and [p for p, _ in report.skipped] == ["1.png", "2.png"]
    assert "no caption file" in report.skipped[0][1]


def test_a_callback_may_cancel_while_pixels_are_compared(tmp_path):
    draw(tmp_path / "a.png", 1)
    draw(tmp_path / "b.bmp", 1)
    seen = []

    def stop(done, total):
        seen.append((done, total))
        if len(seen) > 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        scan_folder(config(tmp_path), stop)

"""A folder as people have them: everything in it accounted for, nothing raised."""

import argparse
import json
import os
import sys

import pytest
from PIL import Image

from trainer.cli import scan as scan_cli
from trainer.config import DatasetConfig
from trainer.data import caption_for
from trainer.data.paths import find_folder, natural
from trainer.data.scan import scan_folder, survey


def config(folder, **options):
    return DatasetConfig(folder=str(folder), resolution=64, bucket_step=16, **options)


def draw(path, size=(64, 64), colour="red", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_mixed_folder(tmp_path):
    draw(tmp_path / "2.png", colour="red")
    draw(tmp_path / "10.PNG", colour="blue", size=(128, 64))
    draw(tmp_path / "sub" / "it's a \u00e9.jpg", colour="green", size=(640, 640))
    draw(tmp_path / "hidden_type.bin", colour="grey", format="PNG")
    write(tmp_path / "2.txt", "a red square")
    write(tmp_path / "10.txt", "")
    write(tmp_path / "broken.png", "no picture")
    write(tmp_path / "notes.md", "hello")
    write(tmp_path / ".hidden.png", "")
    draw(tmp_path / ".thumbs" / "a.png")
    draw(tmp_path / "sub" / "@eaDir" / "a.jpg" / "THUMB_B.jpg")
    write(tmp_path / "photo.dng", "II*\0")
    calls = []
    report = scan_folder(config(tmp_path), lambda done, total: calls.append((done, total)))
    assert [s.relative for s in report.samples] == ["2.png", "10.PNG", "hidden_type.bin", "sub/it's a \u00e9.jpg"]
    assert [p for p, _ in report.skipped] == ["broken.png", "photo.dng"]
    assert "no picture" in report.skipped[0][1] and "RAW" in report.skipped[1][1]
    assert report.ignored == 6  # two captions, notes, three hidden
    assert len(report.samples) + len(report.skipped) + report.ignored == sum(len(f) for _, _, f in os.walk(tmp_path))
    assert report.uncaptioned == 3
    by_name = {s.relative: s for s in report.samples}
    assert by_name["2.png"].caption == "a red square" and by_name["10.PNG"].caption == "10"
    assert by_name["10.PNG"].bucket == (80, 48) and by_name["10.PNG"].width == 128
    assert by_name["sub/it's a \u00e9.jpg"].caption == "it's a \u00e9"
    assert dict(report.buckets()) == {(64, 64): 3, (80, 48): 1}
    assert any(path == "10.PNG" and "empty caption file" in what for path, what in report.warnings)
    assert calls == [(i, 6) for i in range(1, 7)]
    data = report.as_dict()
    assert (data["images"], data["usable"], data["ignored"]) == (6, 4, 6)
    assert data["captions"]["2.png"] == "a red square" and {"width": 80, "height": 48, "count": 1} in data["buckets"]


def test_duplicates_crops_and_enlargements_are_warned_of(tmp_path):
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png")
    draw(tmp_path / "c.png", size=(2000, 100))
    draw(tmp_path / "d.png", size=(8, 8))
    warned = dict(scan_folder(config(tmp_path, trigger_word="x")).warnings[::-1])
    assert "same file as a.png" in warned["b.png"]
    assert "% of its area" in warned["c.png"]
    assert "enlarged 8.0 times" in warned["d.png"]


def test_small_pictures_are_skipped_without_upscaling(tmp_path):
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png", size=(8, 80))
    report = scan_folder(config(tmp_path, upscale=False))
    assert report.skipped[0][0] == "b.png" and "8 x 80 px" in report.skipped[0][1]


def test_trigger_word_takes_the_place_of_missing_captions(tmp_path):
    draw(tmp_path / "a.png")
    report = scan_folder(config(tmp_path, trigger_word="ohwx"))
    assert report.samples[0].caption == "ohwx" and report.uncaptioned == 1


@pytest.mark.parametrize("content", [{}, {"a.png": "junk", "b.txt": "text"}])
def test_nothing_usable_is_one_line(tmp_path, content):
    for name, text in content.items():
        write(tmp_path / name, text)
    with pytest.raises(ValueError, match="no usable picture") as caught:
        scan_folder(config(tmp_path))
    line = str(caught.value)
    assert str(tmp_path) in line and "\n" not in line and "PNG, JPEG" in line
    assert ("a.png" in line) == bool(content)
    assert survey(config(tmp_path)).samples == []


def test_missing_folder_and_file_for_folder(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        scan_folder(config(tmp_path / "none"))
    write(tmp_path / "file.txt", "")
    with pytest.raises(ValueError, match="is a file"):
        scan_folder(config(tmp_path / "file.txt"))


def test_pasted_paths(tmp_path):
    folder = tmp_path / "my \u00e9 pictures"
    folder.mkdir()
    for text in (f'"{folder}"', f"'{folder}'", f"  {folder}\n", f' "{folder}" ', str(folder)):
        assert find_folder(text) == folder
    if os.name != "nt":
        spaced = tmp_path / "ends in a space "
        spaced.mkdir()
        assert find_folder(str(spaced)) == spaced


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX links and pipes")
def test_links_pipes_and_loops(tmp_path):
    draw(tmp_path / "real" / "a.png")
    (tmp_path / "real" / "loop").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "real")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    draw(outside / "b.png", colour="blue")
    (tmp_path / "linked").symlink_to(outside)
    (tmp_path / "gone.png").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("real/a.txt", "metadata.jsonl"):
        os.mkfifo(tmp_path / name)
    report = scan_folder(config(tmp_path))
    assert [s.relative for s in report.samples] == ["linked/b.png", "real/a.png"]
    assert [p for p, _ in report.skipped] == ["gone.png"] and "gone" in report.skipped[0][1]
    assert report.ignored == 3
    assert caption_for(tmp_path / "real" / "a.png").source == "name"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names that are no text")
def test_names_that_are_no_text(tmp_path):
    draw(tmp_path / "a.png")
    os.rename(tmp_path / "a.png", os.fsencode(tmp_path) + b"/\xff\xe9.png")
    report = scan_folder(config(tmp_path))
    assert len(report.samples) == 1
    json.dumps(report.as_dict(), ensure_ascii=False).encode("utf-8")


def test_a_callback_that_raises_cancels(tmp_path):
    for i in range(40):
        draw(tmp_path / f"{i}.png")

    class Cancelled(Exception):
        pass

    def stop(done, total):
        raise Cancelled

    with pytest.raises(Cancelled):
        scan_folder(config(tmp_path), stop)


def test_natural_order():
    names = ["b.png", "a10.png", "a2.png", "A1.png", "a02.png", "10/a.png", "9/a.png", "\u00b2.png"]
    assert sorted(names, key=natural) == ["9/a.png", "10/a.png", "A1.png", "a02.png", "a2.png", "a10.png", "b.png",
                                          "\u00b2.png"]  # fmt: skip


def run(*arguments):
    parser = argparse.ArgumentParser()
    scan_cli.add_arguments(parser)
    return scan_cli.main(parser.parse_args([str(a) for a in arguments]))


def test_command(tmp_path, capsys):
    draw(tmp_path / "\u00e9.png")
    write(tmp_path / "bad.png", "junk")
    assert run(tmp_path, "--resolution", 64, "--json") == 0
    out = capsys.readouterr().out
    assert out.isascii() and out.count("\n") == 1
    data = json.loads(out)
    assert {"buckets", "captions", "ignored", "images", "skipped", "usable", "warnings"} <= set(data)
    assert data["usable"] == 1 and data["skipped"] == [{"path": "bad.png", "reason": data["skipped"][0]["reason"]}]
    assert run(tmp_path) == 0 and "1 usable" in capsys.readouterr().out
    os.remove(tmp_path / "\u00e9.png")
    with pytest.raises(ValueError, match="no usable picture"):
        run(tmp_path, "--json")
    assert json.loads(capsys.readouterr().out)["usable"] == 0
    for arguments in ((tmp_path / "none",), (tmp_path, "--resolution", "-3")):
        with pytest.raises(ValueError):
            run(*arguments)
        assert capsys.readouterr().out == ""

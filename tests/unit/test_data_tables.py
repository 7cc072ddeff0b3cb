"""Captions in tables, as Hugging Face's ImageFolder and others have them."""

import json
import os

import pytest
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data.scan import survey


def scan(folder, **settings):
    return survey(DatasetConfig(folder=str(folder), resolution=64, bucket_step=16, **settings))


def captions(report):
    return {s.relative: (s.caption, s.source) for s in report.samples}


@pytest.fixture
def folder(tmp_path):
    for i, name in enumerate(["a.png", "b.png", "train/c.png"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64), (i, 0, 0)).save(tmp_path / name)
    return tmp_path


ROWS = [("a.png", "one"), ("b.png", "two, too"), ("train/c.png", "three")]
EXPECTED = {file: (text, "table") for file, text in ROWS}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.jsonl", "\n".join(json.dumps({"file_name": f, "text": t}) for f, t in ROWS) + "\n\n"),
        ("Metadata.JSONL", "\r\n".join(json.dumps({"file_name": f, "caption": t}) for f, t in ROWS)),
        ("captions.jsonl", "\n".join(json.dumps({"image": f, "prompt": t, "n": 1}) for f, t in ROWS)),
        ("metadata.csv", 'file_name,text\na.png,one\nb.png,"two, too"\ntrain/c.png,three\n'),
        ("captions.csv", "FileName;Caption;score\r\na.png;one;1\r\nb.png;two, too;2\r\ntrain\\c.png;three;3\r\n"),
        ("captions.csv", "file\ttext\na.png\tone\nb.png\ttwo, too\ntrain/c.png\tthree"),
        ("captions.csv", 'a.png,one\nb.png,"two, too"\ntrain/c.png,three'),
        ("captions.json", json.dumps(dict(ROWS))),
        ("captions.json", json.dumps({f.removesuffix(".png"): {"caption": t} for f, t in ROWS})),
        ("captions.json", json.dumps([{"file_name": f, "text": t} for f, t in ROWS])),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_kinds_of_tables(folder, name, content, encoding):
    (folder / name).write_bytes(content.encode(encoding))
    report = scan(folder)
    assert captions(report) == EXPECTED
    assert report.warnings == [] and report.uncaptioned == 0 and report.ignored == 1


def test_a_table_in_a_sub_folder_names_files_from_there(folder):
    (folder / "train" / "metadata.jsonl").write_text('{"file_name": "c.png", "text": "inner"}', encoding="utf-8")
    (folder / "metadata.csv").write_text(f'file_name,text\n"{folder / "a.png"}",absolute\n', encoding="utf-8")
    found = captions(scan(folder))
    assert found["train/c.png"] == ("inner", "table") and found["a.png"] == ("absolute", "table")
    assert found["b.png"] == ("b", "name")


def test_a_file_beside_the_picture_comes_first(folder):
    (folder / "metadata.csv").write_text("file_name,text\na.png,table\nb.png,table\n", encoding="utf-8")
    (folder / "a.txt").write_text("file", encoding="utf-8")
    (folder / "b.txt").write_text(" ", encoding="utf-8")
    found = captions(scan(folder))
    assert found["a.png"] == ("file", "file") and found["b.png"] == ("table", "table")


def test_several_rows_are_several_captions(folder):
    (folder / "captions.csv").write_text("image,caption\na.png,one\na.png,two\n", encoding="utf-8")
    report = scan(folder)
    assert report.samples[0].captions == ("one", "two")
    assert report.as_dict()["caption_variants"] == {"a.png": ["one", "two"]}


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("metadata.csv", "name,words\na.png,one\n", "no table of captions"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": "one"}\n{oops\n5\n{"text": "x"}\n', "3 rows without"),
        ("metadata.csv", "file_name,text\na.png,one\ngone.png,x\ngone2.png,y\n", "names 2 pictures not there"),
        ("metadata.csv", b"file_name,text\na.png,caf\xe9\n", "Windows-1252"),
        ("metadata.csv", 'file_name,text\na.png,"' + "x" * 200_000 + '"\n', "no table of captions"),
        ("captions.json", "[" * 50_000, "no table of captions"),
        ("captions.json", "5", "no table of captions"),
        ("metadata.csv", "", ""),
    ],
)
def test_what_is_wrong_with_a_table_is_warned_of(folder, name, content, what):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    report = scan(folder)
    assert len(report.samples) == 3
    warned = [text for path, text in report.warnings if path == name]
    assert len(warned) == bool(what) and all(what in text for text in warned)


def test_two_tables_that_say_the_same_are_one(folder):
    for name in ("captions.csv", "metadata.csv"):
        (folder / name).write_text("file_name,text\na.png,one\n", encoding="utf-8")
    assert scan(folder).samples[0].captions == ("one",)


def test_a_picture_called_like_a_table_has_it_for_itself(folder):
    (folder / "a.png").rename(folder / "captions.png")
    (folder / "captions.json").write_text('{"caption": "mine"}', encoding="utf-8")
    report = scan(folder, trigger_word="x")
    assert captions(report)["captions.png"] == ("mine", "file")
    assert not [path for path, _ in report.warnings if path == "captions.json"]


def test_one_text_for_all_asks_no_table(folder):
    (folder / "metadata.csv").write_text("file_name,text\ngone.png,x\n", encoding="utf-8")
    report = scan(folder, fixed_caption="all the same")
    assert {c for c, _ in captions(report).values()} == {"all the same"} and report.warnings == []


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
def test_a_table_that_cannot_be_read(folder):
    (folder / "metadata.csv").symlink_to(folder / "nothing")
    report = scan(folder)
    assert len(report.samples) == 3 and report.ignored == 1
    assert "cannot be read" in dict(report.warnings)["metadata.csv"]

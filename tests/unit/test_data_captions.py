"""Captions in the encodings and shapes that people have them in."""

import pytest
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data.captions import Caption, caption_for, cut_off, decode, find_caption, name_words

TEXT = "caf\u00e9 by the sea"


@pytest.mark.parametrize(
    ("raw", "doubt"),
    [
        (TEXT.encode("utf-8"), ""),
        (b"\xef\xbb\xbf" + TEXT.encode("utf-8"), ""),
        (b"\xff\xfe" + TEXT.encode("utf-16-le"), ""),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), ""),
        (b"\xff\xfe\0\0" + TEXT.encode("utf-32-le"), ""),
        (TEXT.encode("utf-16-le"), "UTF-16"),
        (TEXT.encode("utf-16-be"), "UTF-16"),
        (TEXT.encode("cp1252"), "Windows-1252"),
    ],
)
def test_encodings(tmp_path, raw, doubt):
    (tmp_path / "a.txt").write_bytes(raw)
    caption = caption_for(tmp_path / "a.png")
    assert (caption.text, caption.source) == (TEXT, "file")
    assert doubt in caption.warning and bool(caption.warning) == bool(doubt)
    if doubt:
        assert "a.txt" in caption.warning


def test_a_text_that_is_not_what_its_first_bytes_say_is_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe" + "a cat".encode("utf-16-le") + b"!")
    caption = caption_for(tmp_path / "a.png")
    assert caption.text.startswith("a cat")
    told = "has a caption file that begins as UTF-16-LE and does not go on so: save it as UTF-8 (a.txt)"
    assert caption.warning == told


def test_what_is_no_text_is_no_caption(tmp_path):
    Image.effect_noise((64, 64), 50).save(tmp_path / "a.png")
    for data in ((tmp_path / "a.png").read_bytes(), bytes(300), bytes(range(256)) * 20, b"\0"):
        (tmp_path / "a.txt").write_bytes(data)
        caption = caption_for(tmp_path / "a.png", "ohwx")
        assert caption.text == "ohwx" and caption.warning
    (tmp_path / "a.txt").write_bytes("\u732b, \u72ac\n".encode("utf-16-le"))
    assert caption_for(tmp_path / "a.png").text == "\u732b, \u72ac"


def test_bytes_that_no_encoding_has_still_give_text():
    text, doubt = decode(b"a \x81 b \xe9")
    assert text == "a \ufffd b \u00e9" and doubt
    assert decode(b"\xef\xbb\xbfa\xff")[1]


def test_lines_are_joined_and_controls_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"  one,\r\n\r\n two\x00\x07 \rthree\nfour  \n")
    assert caption_for(tmp_path / "a.jpg").text == "one, two three four"


def test_files_beside_the_picture(tmp_path):
    (tmp_path / "a.caption").write_text("from caption", encoding="utf-8")
    assert caption_for(tmp_path / "a.png").text == "from caption"
    (tmp_path / "a.TXT").write_text("from TXT", encoding="utf-8")
    assert caption_for(tmp_path / "a.png").text == "from TXT"
    (tmp_path / "two.dots.png").touch()
    (tmp_path / "two.txt").write_text("of another picture", encoding="utf-8")
    assert caption_for(tmp_path / "two.dots.png").source == "name"


def test_missing_and_empty_captions(tmp_path):
    path = tmp_path / "a_red-circle_02.png"
    caption = caption_for(path)
    assert (caption.text, caption.source) == ("a red circle 02", "name") and "no caption file" in caption.warning
    caption = caption_for(path, " ohwx\n")
    assert (caption.text, caption.source) == ("ohwx", "trigger") and "ohwx" in caption.warning
    (tmp_path / "a_red-circle_02.txt").write_text(" \n", encoding="utf-8")
    caption = caption_for(path)
    assert caption.text == "a red circle 02" and "empty caption file" in caption.warning
    (tmp_path / "a_red-circle_02.txt").write_text("mine", encoding="utf-8")
    assert caption_for(path, "ohwx").text == "mine"


def test_unreadable_and_huge_caption_files(tmp_path):
    (tmp_path / "a.txt").mkdir()
    assert "cannot be read" in caption_for(tmp_path / "a.png").warning
    (tmp_path / "b.txt").write_bytes(b"x" * ((1 << 20) + 1))
    caption = caption_for(tmp_path / "b.png")
    assert caption.text == "b" and "1 MiB" in caption.warning


def test_names_without_words():
    assert name_words("___") == "___"
    assert name_words("bad\udcffname") == "bad?name"


def test_a_name_with_its_extension_counts_after_one_without(tmp_path):
    (tmp_path / "a.png.txt").write_text("whole name", encoding="utf-8")
    assert caption_for(tmp_path / "a.png").text == "whole name"
    (tmp_path / "a.txt").write_text("stem", encoding="utf-8")
    assert caption_for(tmp_path / "a.png").text == "stem"


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('{"caption": "a cat"}', ("a cat",)),
        ('{"Caption ": "a cat"}', ("a cat",)),
        ('{"text": "a cat", "url": "b"}', ("a cat",)),
        ('{"prompt": "a cat"}', ("a cat",)),
        ('{"description": "a cat"}', ("a cat",)),
        ('{"caption": "", "text": "a cat"}', ("a cat",)),
        ('{"caption": null, "tags": "1girl, hat"}', ("1girl, hat",)),
        ('"a cat"', ("a cat",)),
        ('["a cat", "a pet"]', ("a cat", "a pet")),
        ('{"captions": ["a cat", " ", "a pet"]}', ("a cat", "a pet")),
        ('{"caption": {"text": "a cat"}}', ("a cat",)),
        ('[{"caption": "a cat"}]', ("a cat",)),
        ('{"tags": ["1girl", "hat"]}', ("1girl, hat",)),
        ('{"tags": {"general": ["hat", "red"], "artist": ["me"]}}', ("hat, red, me",)),
        ('{"tag_string": "1girl red_hat"}', ("1girl, red_hat",)),
        ('{"caption": "two\\nlines"}', ("two lines",)),
        ('{"caption": "half \\ud83d a smile \\ud83d\\ude00"}', ("half ? a smile \U0001f600",)),
    ],
)
def test_json_as_others_write_it(tmp_path, content, texts):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + content.encode())
    caption = caption_for(tmp_path / "a.png")
    assert (caption.texts, caption.source, caption.warning) == (texts, "file", "")
    caption.text.encode("utf-8")


@pytest.mark.parametrize(
    ("content", "why"),
    [("{", "no valid JSON"), ("[" * 100_000, "no valid JSON"), ("", "no valid JSON"),
     ('{"seed": 1}', "without a caption"), ('{"caption": 5}', "without a caption"), ("null", "without a caption")],
)  # fmt: skip
def test_json_without_a_caption_falls_back_with_a_warning(tmp_path, content, why):
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    caption = caption_for(tmp_path / "a.png", "ohwx")
    assert (caption.text, caption.source) == ("ohwx", "trigger") and why in caption.warning
    (tmp_path / "a.txt").write_text("mine", encoding="utf-8")
    assert caption_for(tmp_path / "a.png") == Caption(("mine",), "file")


def found(path, **settings):
    return find_caption(path, DatasetConfig(folder=".", **settings))


def test_what_pictures_without_a_caption_get(tmp_path):
    path = tmp_path / "red_cars" / "a_1.png"
    path.parent.mkdir()
    fixed = found(path, missing_captions="fixed", fixed_caption="a car")
    assert (fixed.texts, fixed.source) == (("a car",), "instead") and "fixed caption" in fixed.warning
    folder = found(path, missing_captions="folder")
    assert (folder.texts, folder.source) == (("red cars",), "folder") and "folder's name" in folder.warning
    for policy in ("skip", "stop"):
        caption = found(path, missing_captions=policy, trigger_word="ohwx")
        assert caption.texts == () and "no caption file" in caption.warning
    (path.parent / "a_1.txt").write_text("mine", encoding="utf-8")
    for policy in ("fixed", "folder", "skip", "stop"):
        caption = found(path, missing_captions=policy, fixed_caption="a car" if policy == "fixed" else "")
        assert caption == Caption(("mine",), "file")


def test_one_text_for_all(tmp_path):
    (tmp_path / "a.txt").write_text("mine", encoding="utf-8")
    caption = found(tmp_path / "a.png", fixed_caption=" a car\n")
    assert caption == Caption(("a car",), "fixed")
    assert found(tmp_path / "a.png", fixed_caption=" \n") == Caption(("mine",), "file")


def test_lines_joined_or_one_at_a_time(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\n  two \nthree")
    assert found(tmp_path / "a.png").texts == ("one two three",)
    assert found(tmp_path / "a.png", caption_lines="random", caption_variants=1).texts == ("one", "two", "three")
    (tmp_path / "a.txt").write_text("\n".join(map(str, range(150))), encoding="utf-8")
    many = found(tmp_path / "a.png", caption_lines="random")
    assert len(many.texts) == 100 and "150 captions" in many.warning


@pytest.mark.parametrize(
    ("prefix", "suffix", "result"),
    [("", "", "a cat"), ("photo of", "", "photo of a cat"), ("ohwx, ", "", "ohwx, a cat"), ("ohwx,", "", "ohwx, a cat"),
     ("", "outside", "a cat outside"), ("", ", outside", "a cat, outside"), ("x", ".", "x a cat.")],
)  # fmt: skip
def test_prefix_and_suffix(tmp_path, prefix, suffix, result):
    (tmp_path / "a.txt").write_text("a cat", encoding="utf-8")
    assert found(tmp_path / "a.png", caption_prefix=prefix, caption_suffix=suffix).texts == (result,)
    for settings in ({"trigger_word": "a cat"}, {"missing_captions": "fixed", "fixed_caption": "a cat"}):
        assert found(tmp_path / "b.png", caption_prefix=prefix, caption_suffix=suffix, **settings).texts == (result,)


def test_texts_that_are_cut_off_are_named():
    calls = []

    def count(text):
        calls.append(text)
        return len(text.split()) + 1

    long = "word " * 60
    pictures = [("a.png", ("short",)), ("b.png", ("short", long)), ("c.png", (long,)), ("d.png", ("x" * 300,))]
    assert cut_off(pictures, count, 50) == [
        (name, "has a caption of 61 tokens: 50 are read, its end is cut off") for name in ("b.png", "c.png")]
    assert calls == [long, "x" * 300], "each text is counted once, and only if it can be too long"

"""Captions in the encodings and shapes that people have them in."""

import pytest

from trainer.data.captions import caption_for, decode, name_words

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

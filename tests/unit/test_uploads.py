"""Datasets that are dropped on the canvas: what is kept, what is refused, and that nothing of a refused one remains."""

from __future__ import annotations

import io
import os
import shutil
import stat
import time
import types
import zipfile
from pathlib import Path

import pytest

from tests.unit.test_follow import _load

uploads = _load("uploads")


def _zip(files: dict[str, bytes], **options: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, **options) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def _send(upload, data: bytes) -> None:
    spool = upload.spool()
    with open(spool, "wb") as file:
        upload.write(file, data)
    upload.unpack(spool)


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_zip_becomes_a_folder_of_pictures_and_captions(tmp_path: Path) -> None:
    upload = uploads.Uploads().begin(tmp_path, "My cats.zip"[:-4])
    _send(upload, _zip({"a.png": b"1", "sub/b.JPG": b"22", "sub/b.txt": b"a cat", "__MACOSX/a.png": b"x",
                        ".hidden.png": b"x", "virus.exe": b"x", "script.py": b"x", "folder/": b""}))
    told = upload.finish()
    assert told == {"folder": "My cats", "pictures": 2, "texts": 1, "skipped": 4, "bytes": 8}
    assert _files(tmp_path) == ["My cats/a.png", "My cats/sub/b.JPG", "My cats/sub/b.txt"]


def test_single_files_and_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    upload = uploads.Uploads().begin(tmp_path, "cats")
    target = upload.place("one/a.png")
    with open(target, "wb") as file:
        upload.write(file, b"picture")
    assert upload.place("notes.docx") is None
    for odd in ("Icon\r", "what?.docx", "con", "a/../b.exe", "sub/.DS_Store"):
        assert upload.place(odd) is None, "it is left out, whatever it is called"
    with pytest.raises(ValueError, match="twice"):
        upload.place("one/a.png")
    assert upload.finish()["folder"] == "cats_2" and _files(tmp_path) == ["cats_2/one/a.png"]


@pytest.mark.parametrize("name", ["../a.png", "a/../../b.png", "/etc/a.png", "C:\\a.png", "..\\a.png", "a//b.png",
                                  "./a.png", "con.png", "sub/NUL/a.png", "a\0b.png", "a?.png", "x" * 300 + ".png",
                                  "sub /a.png", "a./b.png", "/".join("d" * 40) + "/a.png", "\ud800.png"])
def test_a_name_that_leads_out_or_would_not_do_ends_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="file name|folders deep") as caught:
        uploads.Upload(tmp_path / "input", "x").place(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../evil.png", "ok/../../evil.png", "/tmp/evil.png"])
def test_a_zip_with_such_a_name_leaves_nothing(tmp_path: Path, name: str) -> None:
    root = tmp_path / "input"
    upload = uploads.Upload(root, "x")
    with pytest.raises(ValueError):
        _send(upload, _zip({"a.png": b"1", name: b"evil"}))
    upload.drop()
    assert _files(tmp_path) == [] and list(root.iterdir()) == []


def test_a_link_in_a_zip_is_left_out(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        link = zipfile.ZipInfo("link.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("a.png", b"1")
    upload = uploads.Upload(tmp_path, "x")
    _send(upload, out.getvalue())
    assert upload.finish()["pictures"] == 1 and _files(tmp_path) == ["x/a.png"]


def test_a_bomb_is_stopped_while_it_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "SMALL", 1 << 20)
    data = _zip({f"{i}.bmp": b"\0" * (8 << 20) for i in range(4)}, compresslevel=9)
    assert len(data) * uploads.MOST_GROWTH < 32 << 20
    upload = uploads.Upload(tmp_path, "x")
    with pytest.raises(ValueError, match="far more"):
        _send(upload, data)
    written = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert written < 12 << 20, "what it claims is not believed, what comes is counted"


def test_a_header_that_lies_about_its_size_ends_it(tmp_path: Path) -> None:
    data = bytearray(_zip({"a.png": b"\0" * 1000}))
    at = data.find(b"PK\x01\x02") + 24
    data[at : at + 4] = (10).to_bytes(4, "little")
    upload = uploads.Upload(tmp_path, "x")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        _send(upload, bytes(data))


@pytest.mark.parametrize("data", [b"no zip", b"", b"PK\x03\x04" + b"\0" * 40])
def test_what_is_no_zip_is_said(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be unpacked"):
        _send(uploads.Upload(tmp_path, "x"), data)


def test_an_encrypted_zip_is_said(tmp_path: Path) -> None:
    data = bytearray(_zip({"a.png": b"1234"}))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(mark) + offset] |= 1
    with pytest.raises(ValueError, match="encrypted"):
        _send(uploads.Upload(tmp_path, "x"), bytes(data))


def test_a_full_disk_and_nothing_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = uploads.Upload(tmp_path, "x")
    with pytest.raises(ValueError, match="no pictures"):
        upload.finish()
    usage = types.SimpleNamespace(free=uploads.LEFT_FREE + 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    upload.write(io.BytesIO(), b"123")
    with pytest.raises(ValueError, match="nearly full"):
        upload.write(io.BytesIO(), b"1234")


@pytest.mark.parametrize("given, name", [("cats", "cats"), ("a/../b", "a .. b"), ("", "pictures"), ("...", "pictures"),
                                         ("con", "pictures"), ("x" * 300, "x" * 80), (" a:b ", "a b")])
def test_folder_names_are_plain(given: str, name: str) -> None:
    assert uploads.folder_name(given) == name


def test_an_upload_that_was_given_up_is_swept_a_day_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = uploads.Uploads().begin(tmp_path, "x")
    uploads.Uploads().begin(tmp_path, "y")
    assert old.folder.is_dir()
    kept = uploads.Uploads()
    one, given_up = kept.begin(tmp_path, "y"), kept.begin(tmp_path, "z")
    day = time.time() - uploads._STALE - 1
    for upload in (old, one, given_up):
        os.utime(upload.folder, (day, day))
    given_up.touched = day
    kept.begin(tmp_path, "z")
    assert not old.folder.exists() and one.folder.is_dir(), "one of this server may still be coming"
    assert not given_up.folder.exists(), "nothing of it has come for a day"
    assert kept.end(one.id) is one
    for upload in (one, given_up):
        with pytest.raises(FileNotFoundError):
            kept.get(upload.id)

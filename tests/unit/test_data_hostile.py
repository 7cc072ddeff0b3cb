"""Folders and files as nobody should have them: the scan never raises, and accounts for every file."""

import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data import formats
from trainer.data.images import ImageProblem, examine, load_image
from trainer.data.scan import survey

ROOT = Path(__file__).resolve().parents[2]
NOISE = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
UNREADABLE = {"PALM"}
"""Formats that Pillow writes and does not read."""


def encoded(kind, mode):
    """A picture in a format that Pillow writes, or None if the format has no such mode."""
    deep = {"I;16": np.uint16, "F": np.float32}.get(mode)
    image = Image.fromarray(NOISE[..., 0].astype(deep)) if deep else Image.fromarray(NOISE).convert(mode)
    stream = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.save(stream, format=kind)
    except (OSError, ValueError, KeyError, NotImplementedError):
        return None
    return stream.getvalue()


def kinds():
    formats.known_formats()
    return sorted(set(Image.SAVE) - formats.NOT_PICTURES - {"ICNS"})  # seconds to write, and its parts are PNGs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", kinds())
def test_cut_files_of_every_format_are_told(tmp_path, kind):
    tried = 0
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16", "F", "CMYK"):
        data = encoded(kind, mode)
        if data is None:
            continue
        path = tmp_path / f"a.{kind.lower()}"
        path.write_bytes(data)
        if kind not in UNREADABLE:
            found = examine(path)
            assert load_image(path).size == (found.width, found.height)
            tried += 1
        for share in (0.97, 0.9, 0.5, 0.2, 0.05, 0):
            path.write_bytes(data[: int(len(data) * share)])
            try:
                found = examine(path)
            except ImageProblem as problem:
                assert "\n" not in str(problem)
                with pytest.raises(ImageProblem):
                    load_image(path)
                continue
            assert share > 0.5, (mode, share)  # what is cut off is padding, or a palette that its format can do without
            assert load_image(path).size == (found.width, found.height)
    assert tried or kind in UNREADABLE


@given(data=st.binary(max_size=200), extension=st.sampled_from([".png", ".jpg", ".heic", ".jxl", ".tif", ".webp", ""]),
       head=st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n",
                             b"II*\0", b"\0\0\0\x18ftypheic", b"GIF89a", b"RIFF\0\0\0\0WEBP", b"BM"]))  # fmt: skip
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_are_accounted_for(tmp_path, data, extension, head):
    for old in tmp_path.iterdir():
        old.unlink()
    (tmp_path / f"a{extension}").write_bytes(head + data)
    report = survey(DatasetConfig(folder=str(tmp_path), resolution=64, bucket_step=16))
    assert len(report.samples) + len(report.skipped) + report.ignored == 1


def draw_hostile(folder):
    """Files of every sort; returns the names of those that must be skipped."""
    image = Image.fromarray(NOISE)
    (folder / "folder.png").mkdir()
    image.save(folder / "folder.png" / "inside.png")
    (folder / "empty.webp").write_bytes(b"")
    for width, height in ((1, 1), (1, 10000), (10000, 1)):
        Image.new("RGB", (width, height), "red").save(folder / f"{width}x{height}.png")
    image.save(folder / "wrong.gif", format="PNG")
    image.save(folder / "wrong.jxl", format="JPEG")
    image.save(folder / "no extension", format="PNG")
    image.save(folder / "raw.cr2", format="JPEG")
    (folder / "page.jpg").write_text("<!DOCTYPE html><html>404</html>", encoding="utf-8")
    (folder / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    for name in ("archive.zip", "film.mp4", "data.json", "layers.psd", "vector.svg", "icon.ico", "notes.md"):
        (folder / name).write_bytes(bytes(range(256)) * 4)
    return {"empty.webp", "raw.cr2", "page.jpg", "pointer.png", "layers.psd", "vector.svg", "icon.ico"}


def test_a_hostile_folder(tmp_path):
    expected = draw_hostile(tmp_path)
    report = survey(DatasetConfig(folder=str(tmp_path), resolution=256))
    total = sum(len(names) for _, _, names in os.walk(tmp_path))
    assert len(report.samples) + len(report.skipped) + report.ignored == total
    assert {path for path, _ in report.skipped} == expected
    assert {s.relative: s.bucket for s in report.samples} == {
        "1x1.png": (256, 256), "1x10000.png": (128, 512), "10000x1.png": (512, 128), "wrong.gif": (256, 256),
        "folder.png/inside.png": (256, 256), "wrong.jxl": (256, 256), "no extension": (256, 256),
    }  # fmt: skip
    json.dumps(report.as_dict(), ensure_ascii=True)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX links, pipes and sockets")
def test_links_devices_and_odd_names(tmp_path):
    image = Image.fromarray(NOISE)
    os.mkfifo(tmp_path / "pipe.jpg")
    for name, target in (("zero.png", "/dev/zero"), ("null.png", "/dev/null"), ("round.png", "round.png"),
                         ("kernel.png", "/proc/self/mem"), ("nothing.png", "no such file")):  # fmt: skip
        os.symlink(target, tmp_path / name)
    for name in (" spaces .png", "new\nline.png", "\u202egnp.exe.png", "'quoted'.png", "x" * 250 + ".png", "-rf.png"):
        image.save(tmp_path / name)
    deep = tmp_path
    for _ in range(30):
        deep /= "d" * 100
        deep.mkdir()
    image.save(deep / "a.png")
    with socket.socket(socket.AF_UNIX) as listener:
        place = os.getcwd()
        os.chdir(tmp_path)  # a socket's path may have 107 characters
        listener.bind("socket.png")
        os.chdir(place)
        report = survey(DatasetConfig(folder=str(tmp_path), resolution=64, bucket_step=16))
    assert len(report.samples) == 7
    total = sum(len(names) for _, _, names in os.walk(tmp_path))
    assert len(report.samples) + len(report.skipped) + report.ignored == total
    reasons = dict(report.skipped)
    assert "gone" in reasons["nothing.png"] and "cannot be read" in reasons["round.png"]
    assert set(reasons) <= {"nothing.png", "round.png", "kernel.png"}
    for name in ("pipe.jpg", "zero.png", "socket.png"):
        with pytest.raises(ImageProblem, match="not a file"):
            load_image(tmp_path / name)
    with pytest.raises(ImageProblem, match="folder"):
        load_image(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
def test_files_and_folders_that_may_not_be_read():
    code = """
import json, os, sys
from trainer.config import DatasetConfig
from trainer.data.scan import survey
config = DatasetConfig(folder=sys.argv[1], resolution=64, bucket_step=16)
assert len(survey(config).samples) == 3  # all modules are there now
os.chmod(os.path.join(config.folder, "secret.png"), 0)
os.chmod(os.path.join(config.folder, "closed"), 0)
os.chmod(config.folder, 0o755)
if os.geteuid() == 0:
    os.setuid(65534)  # nobody: root may read everything
report = survey(config)
print(json.dumps([[s.relative for s in report.samples], report.skipped]))
"""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        folder = Path(place)
        for name in ("a.png", "secret.png", "closed/inside.png"):
            (folder / name).parent.mkdir(exist_ok=True)
            Image.fromarray(NOISE).save(folder / name)
        done = subprocess.run([sys.executable, "-c", code, place], cwd=ROOT, capture_output=True, text=True)
        os.chmod(folder / "closed", 0o755)
    assert done.returncode == 0, done.stderr
    usable, skipped = json.loads(done.stdout)
    assert usable == ["a.png"]
    assert [name for name, _ in skipped] == ["closed", "secret.png"]
    assert all("Permission denied" in reason for _, reason in skipped)

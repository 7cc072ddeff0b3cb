"""What is left of an export that reads back otherwise, is given up, or finds another file in its place."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
from exports import left, write
from workers import wait_for

from trainer.export import reread
from trainer.export.write import ExportOptions, export
from trainer.run import RunDirectory
from trainer.weights import WriteFailed


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp8"}, {"lora_rank": 4}])
def test_a_file_that_reads_back_otherwise_is_not_left(trained, tmp_path, monkeypatch, options):
    """The disk flips one bit, anywhere: an older file stays whole, and no part of the new one."""
    run, trainer = trained
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.safetensors").write_bytes(b"the file before")
    real = reread.compare

    def flipped(path: Path, *args, **kwargs):
        with open(path, "r+b") as file:
            place = flipped.place % path.stat().st_size
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 16]))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(reread, "compare", flipped)
    for place in (5, 300, 100_003, -1):
        flipped.place = place
        with pytest.raises(WriteFailed, match="a.safetensors reads back as something else"):
            write(run, out / "a.safetensors", trainer, overwrite=True, **options)
        assert (out / "a.safetensors").read_bytes() == b"the file before" and left(out) == ["a.safetensors"]


@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"dtype": "fp8"}, {"lora_rank": 4}])
def test_an_export_can_be_given_up_at_any_moment(trained, tmp_path, options):
    run, trainer = trained
    out = tmp_path / "out"
    out.mkdir()
    seen: list[str] = []
    export(run, out / "whole.safetensors", ExportOptions(**options), trainer=trainer,
           progress=lambda what, done, total: seen.append(what) or None)  # fmt: skip
    names = ["extracting", "measuring"] if "lora_rank" in options else []
    assert list(dict.fromkeys(seen)) == [*names, "writing", "checking"]
    (out / "whole.safetensors").unlink()
    for stop in range(0, len(seen), max(1, len(seen) // 25)):
        calls = iter(range(len(seen)))

        def report(*_: object, calls=calls, stop=stop) -> None:
            if next(calls) == stop:
                raise ValueError("given up")

        with pytest.raises(ValueError, match="given up"):
            export(run, out / "a.safetensors", ExportOptions(**options), trainer=trainer, progress=report)
        assert left(out) == []


@pytest.mark.parametrize("how", ["cancel", "quit"])
def test_a_worker_leaves_off_exporting_when_it_is_told_to(tiny, serve, tmp_path, monkeypatch, how):
    """Its progress is told meanwhile, and the file that was there stays."""
    config, folder, manifest = tiny()
    worker, client = serve(RunDirectory.create(folder, config, manifest))
    (tmp_path / "a.safetensors").write_bytes(b"the file before")

    def endless(path, entries, about, progress):
        for done in itertools.count():  # a very slow disk
            progress(done, 10**9)
            time.sleep(0.01)

    monkeypatch.setattr(reread, "compare", endless)
    told: list[Exception] = []

    def ask() -> None:
        try:
            client.export(tmp_path / "a.safetensors", "bf16", overwrite=True)
        except Exception as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    now = wait_for(lambda: (client.status() or {}).get("exporting"))
    assert now["what"] in ("writing", "checking") and now["total"] > 0
    wait_for(lambda: (client.status()["exporting"] or {}).get("what") == "checking")
    client.cancel_export() if how == "cancel" else worker.quit("the test says so")
    asking.join(120)
    assert "the export was stopped" in str(told[0])
    assert (tmp_path / "a.safetensors").read_bytes() == b"the file before"
    assert left(tmp_path) == ["a.safetensors", "run"]
    if how == "cancel":
        monkeypatch.undo()
        assert client.status()["exporting"] is None
        assert client.export(tmp_path / "a.safetensors", "bf16", overwrite=True)["step"] == 0


def test_a_file_that_came_meanwhile_is_not_replaced(trained, tmp_path):
    run, trainer = trained

    def report(what: str, done: int, total: int) -> None:
        if (what, done) == ("checking", total):
            (tmp_path / "a.safetensors").write_bytes(b"another's")

    with pytest.raises(ValueError, match="exists: choose another name"):
        export(run, tmp_path / "a.safetensors", ExportOptions(), trainer=trainer, progress=report)
    assert (tmp_path / "a.safetensors").read_bytes() == b"another's" and left(tmp_path) == ["a.safetensors", "run"]


def test_progress_ends_at_the_whole(trained, tmp_path):
    run, trainer = trained
    last: dict[str, tuple[int, int]] = {}
    export(run, tmp_path / "a.safetensors", ExportOptions(lora_rank=4), trainer=trainer,
           progress=lambda what, done, total: last.update({what: (done, total)}))  # fmt: skip
    assert all(done == total > 0 for done, total in last.values()) and len(last) == 4

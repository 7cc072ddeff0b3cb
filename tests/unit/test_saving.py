"""What is being written is told, by the run directory alone, while it is written; and never after."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
from commands import here
from runs import python
from sessions import events, recipe, session
from workers import make

from trainer import files
from trainer.run import RunDirectory
from trainer.saves import checkpoint, underway


@pytest.fixture
def one(tiny):
    """A run at step 1 that this process has open as a worker would, and its session."""
    run = make(tiny, **recipe(checkpoint_every_steps=2))
    with run.lock():
        run.address_file.write_text("{}")
        made = session(run)
        made.step()
        yield made


@contextlib.contextmanager
def watched(monkeypatch, run: RunDirectory, deed=lambda: None):
    """What a reader is told before every write; then ``deed`` is done."""
    told, reader = [], RunDirectory(run.path)

    def look(what: str, path: Path) -> None:
        if what == "write" and run.path in path.parents and path.suffix in (".safetensors", ".part"):
            told.append(reader.status()["saving"])
            deed()

    monkeypatch.setattr(files, "failpoint", look)
    monkeypatch.setattr(checkpoint, "HANDS", 1)
    yield told
    monkeypatch.setattr(files, "failpoint", None)
    assert reader.status()["saving"] is None and not (run.path / underway.NOTE).exists()


def rises(told: list[dict]) -> bool:
    done = [one["done"] for one in told]
    return done[0] == 0 and done == sorted(done) and len(set(done)) > 5


def test_how_far_a_save_point_is(one, monkeypatch):
    before = len(one.run.events())
    with watched(monkeypatch, one.run) as told:
        one.save()
    (total,), size = {each["total"] for each in told}, sum(f.stat().st_size for f in one.run.source().path.iterdir())
    assert {(each["what"], each["step"]) for each in told} == {("save point", 1)} and rises(told)
    tensors = sum(t.nbytes for s in one.trainer.stages for g in s.arena.groups for t in
                  (g.current, *g.storage.values()))
    assert tensors == total <= size and told[-1]["done"] > 0.5 * total
    assert [e["type"] for e in one.run.events()[before:]] == ["saved"], "no event tells it"


def test_how_far_a_checkpoint_is(one, monkeypatch):
    with watched(monkeypatch, one.run) as told:
        one.step()
    assert {(each["what"], each["step"]) for each in told} == {("checkpoint", 2)} and rises(told)
    (file,) = one.run.checkpoints()
    assert 0.9 * file.path.stat().st_size < told[0]["total"] <= file.path.stat().st_size


def test_nothing_is_told_of_what_failed(one, monkeypatch):
    def full() -> None:
        if one.run.status()["saving"]["done"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watched(monkeypatch, one.run, full) as told:
        assert not one.try_save()
    assert told[-1]["done"] and events(one.run, "save_failed")
    with watched(monkeypatch, one.run, full):
        one.step()
    assert events(one.run, "checkpoint_failed")
    assert one.try_save() and one.run.latest_save_point().step == 2


def test_without_room_for_the_note_it_is_saved_untold(one, monkeypatch):
    def no_note(what: str, path: Path) -> None:
        if path.name == underway.NOTE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "failpoint", no_note)
    assert one.save() == 1 and one.run.status()["saving"] is None


WRITES = """
import sys, time
from trainer.run import RunDirectory
from trainer.saves import underway
run = RunDirectory(sys.argv[1])
with run.lock(), underway.noted(run.path, underway.SAVE_POINT, 7, 100):
    run.address_file.write_text("{}")
    run.transition("preparing")

    def write(folder):
        (folder / "a.safetensors").write_bytes(bytes(40))
        print("writes", flush=True)
        time.sleep(60)

    run.write_save_point(7, write)
"""


def test_a_worker_that_is_killed_in_the_middle_leaves_no_word_of_it(run):
    process = python(WRITES, run.path)
    assert process.stdout.readline() == "writes\n"
    assert run.status()["saving"] == {"what": "save point", "step": 7, "done": 40, "total": 100}
    assert "writing the save point of step 7: 40%" in here("status", run.path).stdout
    process.kill(), process.wait()
    assert (run.path / underway.NOTE).exists()
    status = run.status()
    assert status["state"] == "interrupted" and status["saving"] is None
    with run.lock():
        assert not (run.path / underway.NOTE).exists()
        run.address_file.write_text("{}")
        assert run.status()["saving"] is None


def test_a_note_that_is_no_note_tells_nothing(one):
    part = one.run.path / "state" / f"{files.PART}step-000001-x"
    part.mkdir()
    for text in ("", "[1]", "{", '{"what": "else"}', '{"what": "save point", "step": "x", "total": 1}'):
        (one.run.path / underway.NOTE).write_text(text)
        assert one.run.status()["saving"] is None, text

"""What another program holds open cannot be removed on Windows: training and saving go on, and a later save removes it.
"""

import contextlib
import logging
import sys
from pathlib import Path

import pytest
from sessions import events, recipe, session
from workers import make

from trainer import files
from trainer.saves.saved import kept_at, weights


@contextlib.contextmanager
def held(monkeypatch, path: Path):
    """The file as Windows has it while it is mapped: neither it nor a folder above it can be removed or renamed."""
    tried = []

    def refuse(deed: str, at: Path) -> None:
        if deed == "remove" and (at == path or at in path.parents):
            tried.append(at)
            raise PermissionError(13, "held open")

    real = files.os.replace

    def rename(source, target):
        if Path(source) in (path, *path.parents) or Path(target) == path:
            tried.append(Path(source))
            raise PermissionError(13, "held open")
        real(source, target)

    monkeypatch.setattr(files, "failpoint", refuse)
    monkeypatch.setattr(files.os, "replace", rename)
    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files, "sync_directory", lambda path: None)
    yield tried
    monkeypatch.undo()


def steps(run) -> tuple[list[int], list[int]]:
    return [p.step for p in run.save_points()], [c.step for c in run.checkpoints()]


def test_an_old_checkpoint_that_is_held_is_removed_by_a_later_one(tiny, monkeypatch, caplog):
    run = make(tiny, **recipe(checkpoint_every_steps=1, keep_checkpoints=1))
    one = session(run)
    one.step()
    with held(monkeypatch, run.checkpoints()[0].path) as tried, caplog.at_level(logging.WARNING):
        assert one.step() == 2 and one.step() == 3
        assert steps(run)[1] == [1, 3], "what is not held is removed all the same"
        assert len(tried) == 2, "it was not waited for"
    assert "could not be removed" in caplog.text and not events(run, "checkpoint_failed")
    assert one.step() == 4 and steps(run)[1] == [4]


def test_checkpoints_of_a_past_that_was_taken_back_go_first(tiny):
    run = make(tiny, **recipe(checkpoint_every_steps=1, keep_checkpoints=2, save_every_steps=1, keep_save_points=9))
    one = session(run)
    assert [one.step() for _ in range(5)][-1] == 5 and steps(run)[1] == [4, 5]
    one.roll_back(1)
    one.step()
    assert steps(run)[1] == [2, 5], "the newest of what is kept in any case"
    one.step()
    assert steps(run)[1] == [2, 3]


def test_an_old_save_point_that_is_held_is_removed_by_a_later_one(tiny, monkeypatch):
    run = make(tiny, **recipe(save_every_steps=1, keep_save_points=1))
    one = session(run)
    one.step()
    with held(monkeypatch, sorted(run.save_points()[0].path.iterdir())[0]) as tried:
        one.step(), one.step()
        assert steps(run)[0] == [1, 3] and len(tried) == 2
    assert not events(run, "save_failed")
    one.step()
    assert steps(run)[0] == [4] and len(list((run.path / "state").iterdir())) == 1


def test_what_was_removed_in_part_goes_with_the_next_save(tiny, monkeypatch):
    run = make(tiny, **recipe(save_every_steps=1, keep_save_points=1))
    one = session(run)
    one.step()
    real = files.shutil.rmtree
    monkeypatch.setattr(files.shutil, "rmtree", lambda path: (_ for _ in ()).throw(PermissionError(13, "held open")))
    one.step()
    assert len(list((run.path / "state").glob(f"{files.OLD}*"))) == 1
    monkeypatch.setattr(files.shutil, "rmtree", real)
    one.step()
    assert [p.name for p in (run.path / "state").iterdir()] == ["step-000003"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
@pytest.mark.parametrize("windows", [True, False])
def test_weights_of_a_checkpoint_are_not_mapped_where_that_would_hold_it(tiny, monkeypatch, windows):
    run = make(tiny, **recipe(checkpoint_every_steps=1))
    one = session(run)
    one.step()
    monkeypatch.setattr(files, "WINDOWS", windows)
    mine = weights(kept_at(run, 1))
    monkeypatch.undo()
    with open("/proc/self/maps", encoding="utf-8") as file:
        mapped = [line for line in file if str(run.checkpoints()[0].path) in line]
    assert not (windows and mapped)
    plain = {e.name: e for e in one.trainer.entries("bf16")}
    assert set(mine) == set(plain) and all(tuple(mine[k].shape) == plain[k].shape for k in mine)

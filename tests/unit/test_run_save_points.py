"""Save points as folders: one takes the place of the last, whole or not at all. With an engine: test_savepoints.py."""

from pathlib import Path

import pytest
from runs import names, python, save

from trainer import files


def test_a_save_point_takes_the_place_of_the_last(run):
    assert run.latest_save_point() is None
    save(run, 5)
    point = save(run, 10, "y")
    assert names(run) == ["step-000010"] and run.latest_save_point() == point
    assert (point.path / "b" / "c.bin").read_text() == "yy"
    save(run, 20, keep=2)
    assert names(run) == ["step-000010", "step-000020"]
    save(run, 1_000_000, keep=2)
    assert run.latest_save_point().step == 1_000_000 and names(run) == ["step-000020", "step-1000000"]


@pytest.mark.parametrize("error, told", [
    (OSError(28, "No space left on device"), "no room in .*state for the save point of step 6.*free some space"),
    (OSError(5, "Input/output error"), "step 6 could not be written to .*state: Input/output error"),
    (KeyboardInterrupt(), ""),
])
def test_a_save_that_fails_leaves_the_last_one_and_nothing_else(run, error, told):
    point = save(run, 5)

    def write(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise error

    with pytest.raises(KeyboardInterrupt if not told else files.WriteFailed, match=told or None):
        run.write_save_point(6, write)
    assert names(run) == ["step-000005"] and run.latest_save_point() == point


def test_killed_while_saving_the_last_save_point_stays_and_the_next_start_cleans_up(run):
    save(run, 5)
    code = """
import os, signal, sys
from trainer.run import RunDirectory
run = RunDirectory(sys.argv[1])
def write(folder):
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
with run.lock():
    run.write_save_point(6, write)
"""
    assert python(code, run.path).wait() == -9
    assert len(names(run)) == 2 and run.latest_save_point().step == 5
    with run.lock():
        assert names(run) == ["step-000005"]


@pytest.mark.parametrize("damage", ["lost", "short", "no list"])
def test_a_damaged_save_point_is_not_taken_for_whole(run, damage):
    save(run, 5, keep=2)
    broken = save(run, 6, keep=2).path
    if damage == "lost":
        (broken / "b" / "c.bin").unlink()
    elif damage == "short":
        (broken / "a.bin").write_text("")
    else:
        (broken / "save.json").unlink()
    assert run.latest_save_point().step == 5
    assert save(run, 6, "z").path == broken  # and made again when the run gets there again
    assert (broken / "a.bin").read_text() == "z"


def test_the_next_save_sweeps_a_damaged_one_away(run):
    save(run, 5, keep=2)
    (save(run, 6, keep=2).path / "a.bin").unlink()
    save(run, 7, keep=2)
    assert names(run) == ["step-000005", "step-000007"]


def test_what_came_later_goes_from_its_end_so_that_a_past_is_left(run, monkeypatch):
    for step in (5, 6, 7, 8):
        save(run, step, keep=4)
    gone = []
    monkeypatch.setattr(files, "failpoint", lambda deed, path: gone.append(path.name) if deed == "rename" else None)
    run.roll_back(5)
    assert [name[len(files.OLD):][:11] for name in gone if name.startswith(files.OLD)] == [
        "step-000008", "step-000007", "step-000006"]


def test_one_under_the_name_of_another_step_is_not_that_steps(run):
    save(run, 5, keep=2)
    point = save(run, 6, keep=2).path
    point.rename(point.with_name("step-000009"))
    assert run.latest_save_point().step == 5

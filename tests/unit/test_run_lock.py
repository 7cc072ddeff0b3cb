"""Who has a run open: one at a time, until it lets go or dies."""

import os
import shutil
import threading

import pytest
from runs import record, walk

from trainer.run import RunDirectory, RunLocked


def test_a_second_one_is_refused_and_death_frees_the_lock(run, holder):
    assert run.locked() and run.worker_alive()
    with pytest.raises(RunLocked, match="'run' is open in another process"), run.lock(wait=0.1):
        pass
    holder.kill()
    holder.wait()
    assert not run.locked() and not run.worker_alive()
    with run.lock():
        assert run.locked()
        with pytest.raises(RunLocked), RunDirectory(run.path).lock(wait=0):  # the same process is no exception
            pass
    assert not run.locked()


def test_whoever_looks_at_the_lock_keeps_nobody_out(run):
    done = threading.Event()
    looking = threading.Thread(target=lambda: [run.locked() for _ in iter(done.is_set, True)])
    looking.start()
    try:
        for _ in range(50):
            with run.lock():
                pass
    finally:
        done.set()
        looking.join()


def test_a_copy_of_a_run_in_training_is_no_run_in_training(run, holder, tmp_path):
    walk(run, "preparing", "training")
    shutil.copytree(run.path, tmp_path / "copy")
    copy = RunDirectory(tmp_path / "copy")
    assert run.status()["state"] == "training" and copy.status()["state"] == "interrupted"
    with copy.lock():
        assert not copy.address_file.exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_on_a_disk_that_cannot_be_written_can_be_looked_at(run):
    with run.lock():
        pass
    record(run, [1], 0.5)
    for path in (run.path, *run.path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert RunDirectory(run.path).status()["step"] == 1
    finally:
        for path in (run.path, *run.path.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("place", [".", "samples", "state", "checkpoints"])
def test_what_was_half_written_is_swept_by_whoever_opens_the_run_next(run, place):
    old, young, whole = (run.path / place / n for n in (".part-a.png", ".part-b.png", "step-000001_00_x.png"))
    for path in (old, young, whole):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    for path in (old, whole):
        os.utime(path, (1, 1))
    with run.lock():
        assert not old.exists() and whole.exists()
        assert young.exists() == (place != "checkpoints"), "it may be in the making, by one who needs no lock for it"

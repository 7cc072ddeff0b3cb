"""The run directory: whole or not there, readable by anyone, changed by one."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer import events, files
from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig
from trainer.flux.model import TINY
from trainer.run import ASK, MAY_CHANGE, REFUSE, RunDirectory, RunLocked, compare
from trainer.runs import find_runs, identity

PACK = Path(__file__).resolve().parents[2]
SAMPLE = {"image": "a.png", "latent": "a", "shape": [8, 8], "caption": "a"}
MANIFEST = {"format": 1, "cache": "cache", "samples": [SAMPLE], "empty_caption": "", "fingerprint": "f"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def run(folder):
    return make(folder)


def config_for(folder: Path, **changes) -> RunConfig:
    model = ModelConfig(flux=str(folder / "flux.safetensors"), vae="/models/vae.safetensors")
    config = RunConfig(name="run", model=model, dataset=DatasetConfig(folder=str(folder / "pictures")))
    return dataclasses.replace(config, **changes)


def make(folder: Path) -> RunDirectory:
    return RunDirectory.create(folder, config_for(folder), MANIFEST)


def python(code: str, *args: object, **options) -> subprocess.Popen:
    """Another process, with the pack at hand."""
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=PACK, stdout=subprocess.PIPE, text=True,
                            **options)


HOLD = """
import sys, time
from trainer.run import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    (RunDirectory(sys.argv[1]).address_file).write_text("{}")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(run):
    """Another process that has the run open, as a worker would."""
    process = python(HOLD, run.path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


# -- what it holds


def test_settings_come_back_and_move_with_the_directory(run, folder, tmp_path):
    assert run.config == config_for(folder)
    assert run.dataset == MANIFEST
    for file in folder.rglob("*"):
        assert str(folder) not in (file.read_text() if file.is_file() else ""), file
    moved = tmp_path / "elsewhere" / "other"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    found = RunDirectory(moved)
    assert found.name == found.status()["run"] == "other"
    assert found.config.model.flux == str(moved / "flux.safetensors")
    assert found.config.model.vae == "/models/vae.safetensors"
    assert found.config.dataset.folder == str(moved / "pictures")


def test_a_run_is_not_made_twice_and_a_broken_creation_is_made_good(run, folder):
    with pytest.raises(ValueError, match="already holds a run"):
        make(folder)
    (folder / "config.json").unlink()  # as if the first creation had been cut short
    with pytest.raises(ValueError, match="no run directory"):
        RunDirectory(folder)
    again = make(folder)
    assert [e["type"] for e in again.events()] == ["state"]


def test_a_new_run_never_takes_the_weights_of_one_that_lay_there(run, folder):
    old = save(run, 500)
    copy = folder.parent / "old"
    shutil.copytree(folder, copy)
    (folder / "state" / ".part-step-000600-x").mkdir()
    (folder / "config.json").unlink()  # deleted, but not wholly
    again = make(folder)
    assert again.latest_save_point() is None and names(again) == []
    assert RunDirectory(copy).latest_save_point().step == 500  # a copied run is the same run
    shutil.copytree(copy / "state" / old.path.name, old.path)
    assert again.latest_save_point() is None
    assert save(again, 500, "new").path == old.path
    assert again.latest_save_point().step == 500 and (old.path / "a.bin").read_text() == "new"


def test_no_run_is_made_where_a_worker_still_has_one_open(run, folder, holder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="still open in a worker"):
        make(folder)


def test_a_creation_cut_short_at_any_file_leaves_no_run_or_a_whole_one(folder, monkeypatch):
    """Each write of the creation is the last one in turn."""

    class Cut(BaseException):
        pass

    left = 0

    def counted(real):
        def write(*args, **options):
            nonlocal left
            if left == 0:
                raise Cut
            left -= 1
            return real(*args, **options)

        return write

    for last in range(10):
        left = last
        with monkeypatch.context() as patch:
            patch.setattr("trainer.files.write_json", counted(files.write_json))
            patch.setattr("trainer.events.EventLog.append", counted(events.EventLog.append))
            try:
                whole = make(folder)
                break
            except Cut:
                pass
        if (folder / "config.json").exists():
            whole = RunDirectory(folder)
            break
    assert last >= 3 and whole.status()["state"] == "created" and len(whole.events()) == 1
    whole.transition("preparing")


def test_a_history_that_cannot_be_is_one_line(run):
    for text, said in (("", "how the run began"),
                       ('{"n": 1, "t": 0, "type": "state", "state": "asleep"}\n', "unknown state 'asleep'")):
        (run.path / "events.jsonl").write_text(text)
        with pytest.raises(ValueError, match=f"events.jsonl .*{said}.*put it back") as caught:
            RunDirectory(run.path).transition("preparing")
        assert "\n" not in str(caught.value)


def test_another_format_is_refused(run, folder):
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        RunDirectory(folder)


def test_runs_are_found_among_other_folders(tmp_path, caplog):
    for name in ("b", "a"):
        make(tmp_path / name)
    (tmp_path / "cache").mkdir()
    make(tmp_path / "broken")
    (tmp_path / "broken" / "run.json").write_text("{")
    assert [r.name for r in find_runs(tmp_path)] == ["a", "b"]
    with pytest.raises(ValueError, match="no folder"):
        find_runs(tmp_path / "nowhere")


# -- events


def test_events_are_numbered_timed_and_kept_as_they_were_given(run):
    before = time.time()
    run.append("step", step=1, loss=0.5, lr=1e-3, seconds=0.1)
    run.append("eval", step=1, loss=float("nan"))
    first, step, evaluation = RunDirectory(run.path).events()
    assert (first["n"], step["n"], evaluation["n"]) == (1, 2, 3)
    assert first["type"] == "state" and before - 60 < step["t"] < time.time() + 1
    assert {k: step[k] for k in ("type", "step", "loss", "lr", "seconds")} == {
        "type": "step", "step": 1, "loss": 0.5, "lr": 1e-3, "seconds": 0.1}
    assert evaluation["loss"] is None  # JSON has no NaN, and a browser would choke on it
    assert run.events(since=2) == [evaluation] and run.events(since=0, limit=1) == [first]


@pytest.mark.parametrize("torn", [b'{"n": 3, "t": 1.0, "type": "st', b"\0\0\0\0", b"x", b'{"n": 3, "type": "step"}'])
def test_a_torn_last_line_is_no_event_and_the_next_takes_its_place(run, torn):
    run.append("step", step=1, loss=0.5, lr=1e-3, seconds=0.1)
    with open(run.path / "events.jsonl", "ab") as file:
        file.write(torn)
    other = RunDirectory(run.path)
    assert [e["n"] for e in other.events()] == [1, 2]
    assert other.status()["step"] == 1
    assert other.append("step", step=2, loss=0.4, lr=1e-3, seconds=0.1)["n"] == 3
    lines = (run.path / "events.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [1, 2, 3]
    assert [e["n"] for e in run.events()] == [1, 2, 3]  # seen by one that was open all the time


def test_a_damaged_line_in_the_middle_loses_only_itself(run):
    for step in (1, 2, 3):
        run.append("step", step=step, loss=0.5, lr=1e-3, seconds=0.1)
    path = run.path / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\xff\xfe{]\n", lines[3]]))
    other = RunDirectory(run.path)
    assert [s for s, _ in other.losses()] == [1, 3]
    assert other.append("sample")["n"] == 5


def test_processes_and_threads_append_at_once(run):
    code = """
import sys
from trainer.run import RunDirectory
run = RunDirectory(sys.argv[1])
for i in range(100):
    run.append("sample", by=sys.argv[2], i=i)
"""
    others = [python(code, run.path, name) for name in "ab"]
    threads = [threading.Thread(target=lambda name=name: [run.append("sample", by=name, i=i) for i in range(100)])
               for name in "cd"]
    for thread in threads:
        thread.start()
    for one in (*threads,):
        one.join()
    assert [p.wait() for p in others] == [0, 0]
    found = run.events()
    assert [e["n"] for e in found] == list(range(1, 402))
    for name in "abcd":
        assert [e["i"] for e in found if e.get("by") == name] == list(range(100))
    assert found == RunDirectory(run.path).events()


def test_a_full_disk_costs_events_no_order_and_the_worker_no_training(run):
    """A limit on the size of files stands for the full disk: the write comes back short, then fails."""
    code = """
import os, resource, sys
from trainer.run import RunDirectory
run = RunDirectory(sys.argv[1])
size = os.path.getsize(run.path / "events.jsonl")
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limit[1]))
try:
    run.append("step", step=1, loss=1.0, lr=1.0, seconds=1.0)
except OSError:
    assert os.path.getsize(run.path / "events.jsonl") == size
    print("raised")
run.log.patient = True
run.append("step", step=1, loss=1.0, lr=1.0, seconds=1.0)
run.append("step", step=2, loss=1.0, lr=1.0, seconds=1.0)
assert run.status()["step"] == 2 and len(RunDirectory(sys.argv[1]).events()) == 1
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
run.append("step", step=3, loss=1.0, lr=1.0, seconds=1.0)
print("went on")
"""
    pytest.importorskip("resource")
    process = python(code, run.path)
    assert process.communicate()[0].split("\n")[:2] == ["raised", "went on"]
    assert [s for s, _ in run.losses()] == [1, 2, 3]
    assert [e["n"] for e in run.events()] == [1, 2, 3, 4]


def test_events_that_waited_for_room_share_no_number_with_those_of_others(run):
    code = """
import os, resource, sys
from trainer.run import RunDirectory
run = RunDirectory(sys.argv[1])
run.log.patient = True
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(run.path / "events.jsonl") + 20, limit[1]))
for step in (1, 2):
    run.append("step", step=step, loss=1.0, lr=1.0, seconds=1.0)
print("waiting", flush=True)
sys.stdin.readline()
assert [e["type"] for e in run.events(1)] == ["sample"] and run.status()["step"] == 2
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
assert run.append("step", step=3, loss=1.0, lr=1.0, seconds=1.0)["n"] == 5
assert run.events() == RunDirectory(sys.argv[1]).events()
assert [s for s, _ in run.losses()] == [1, 2, 3] and run.status()["last_event"] == 5
print("went on")
"""
    pytest.importorskip("resource")
    process = python(code, run.path, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "waiting\n"
    run.append("sample", file="x.png")
    assert process.communicate("\n")[0] == "went on\n"
    assert [(e["n"], e["type"]) for e in run.events()] == [
        (1, "state"), (2, "sample"), (3, "step"), (4, "step"), (5, "step")]


# -- state and history


def walk(run: RunDirectory, *states: str) -> None:
    for state in states:
        run.transition(state)


def test_states_follow_the_table(run):
    walk(run, "preparing", "training", "paused", "training", "finished", "training", "stopped", "preparing", "paused")
    for impossible in ("finished", "created"):
        with pytest.raises(AssertionError, match="cannot go"):
            run.transition(impossible)
    assert all("preparing" in events.TRANSITIONS[s] for s in events.TRANSITIONS if s is not None)
    assert set().union(*events.TRANSITIONS.values()) == {s for s in events.TRANSITIONS if s is not None}


def test_an_error_belongs_to_its_state(run):
    walk(run, "preparing", "training")
    run.transition("failed", error="no")
    assert run.status()["error"] == "no" and run.status()["state"] == "failed"
    walk(run, "training")
    assert run.status()["error"] is None


def record(run: RunDirectory, steps, loss: float) -> None:
    for step in steps:
        run.append("step", step=step, loss=loss, lr=1e-3, seconds=2.0)


def test_a_resumed_run_supersedes_what_came_after_its_save_point(run):
    walk(run, "preparing", "training")
    run.append("eval", step=0, loss=9.0)
    record(run, range(1, 8), 1.0)
    run.append("eval", step=7, loss=8.0)
    run.append("resumed", step=4)
    assert run.losses() == [(s, 1.0) for s in (1, 2, 3, 4)]
    assert run.evals() == [(0, 9.0)]
    record(run, range(5, 7), 2.0)
    assert run.losses() == [(s, 1.0) for s in (1, 2, 3, 4)] + [(5, 2.0), (6, 2.0)]
    assert RunDirectory(run.path).losses() == run.losses()
    assert len(run.events()) == 15  # nothing is taken out of the file
    run.append("resumed", step=0)
    assert run.losses() == [] and run.status()["step"] == 0


def test_status_counts(run, holder):
    run.transition("preparing")
    run.transition("training", target=10)
    for step, seconds in enumerate((9.0, 2.0, 2.0, 2.0), 1):
        run.append("step", step=step, loss=1 / step, lr=1e-3, seconds=seconds)
    status = run.status()
    assert {k: status[k] for k in ("run", "state", "step", "target", "loss", "lr", "seconds_per_step", "error")} == {
        "run": "run", "state": "training", "step": 4, "target": 10, "loss": 0.25, "lr": 1e-3, "seconds_per_step": 2.0,
        "error": None}
    assert status["images_per_second"] == RecipeConfig().batch_size / 2
    assert (status["seconds_left"], status["loss_first"], status["save_point_step"]) == (12.0, 1.0, None)
    run.append("target", target=20)
    assert run.status()["seconds_left"] == 32.0
    assert json.loads(json.dumps(status)) == status


@pytest.mark.parametrize("state", events.OPEN_STATES)
def test_without_a_worker_an_open_run_was_interrupted(run, holder, state):
    walk(run, "preparing", *([state] if state != "preparing" else []))
    record(run, range(1, 8), 1.0)
    assert (run.status()["state"], run.status()["resume_step"]) == (state, 7)
    save(run, 5)
    holder.kill()
    holder.wait()
    for reader in (run, RunDirectory(run.path)):
        status = reader.status()
        assert (status["state"], status["step"], status["save_point_step"], status["resume_step"]) == (
            "interrupted", 7, 5, 5)


def test_one_that_only_reads_a_save_point_is_no_worker(run):
    walk(run, "preparing")
    assert run.status()["state"] == "interrupted"
    with run.lock():
        assert run.status()["state"] == "preparing"  # a worker that is about to say where it answers
        walk(run, "training")
        assert run.status()["state"] == "interrupted" and run.status()["worker"] is None


@pytest.mark.parametrize("state", ["created", "finished", "stopped", "failed"])
def test_without_a_worker_a_closed_run_stays_what_it_was(run, state):
    walk(run, *{"created": (), "finished": ("preparing", "finished"), "stopped": ("preparing", "stopped"),
                "failed": ("preparing", "failed")}[state])
    assert run.status()["state"] == state


def test_reading_a_long_history_again_and_again_is_cheap(run):
    line = json.dumps({"n": 0, "t": 1.0, "type": "step", "step": 0, "loss": 0.5, "lr": 1e-3, "seconds": 1.0})
    with open(run.path / "events.jsonl", "a") as file:
        for i in range(2, 50_000):
            file.write(line.replace('"n": 0', f'"n": {i}').replace('"step": 0', f'"step": {i}') + "\n")
    run.status()
    started = time.process_time()
    for _ in range(20):
        run.status(), run.events(since=49_990)
    assert (time.process_time() - started) / 20 < 0.02


# -- the lock


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


# -- save points


def save(run: RunDirectory, step: int, text: str = "x", keep: int = 1):
    def write(folder: Path) -> None:
        (folder / "a.bin").write_text(text)
        (folder / "b").mkdir()
        (folder / "b" / "c.bin").write_text(text * 2)

    return run.write_save_point(step, write, keep)


def names(run: RunDirectory) -> list[str]:
    return sorted(os.listdir(run.path / "state"))


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


# -- identity, roll-back, deletion


def test_identity_changes_with_rollback_and_recreation_and_not_with_training(folder):
    seen = [identity(folder)]
    run = make(folder)
    seen.append(identity(folder))
    walk(run, "preparing", "training")
    record(run, range(1, 10), 1.0)
    save(run, 5, keep=2)
    save(run, 9, keep=2)
    run.update(dataclasses.replace(run.config, recipe=RecipeConfig(batch_size=1)))
    assert identity(folder) == seen[-1]
    assert run.roll_back(5).step == 5
    seen.append(identity(folder))
    status = run.status()
    assert (status["state"], status["step"], status["rollbacks"]) == ("stopped", 5, 1)
    assert names(run) == ["step-000005"] and run.losses() == [(s, 1.0) for s in range(1, 6)]
    with pytest.raises(ValueError, match="no save point of step 9: it has 5"):
        run.roll_back(9)
    run.delete()
    assert not folder.exists()
    make(folder)
    seen.append(identity(folder))
    assert len(set(seen)) == len(seen)


def test_a_run_in_use_is_neither_rolled_back_nor_deleted(run, holder):
    save(run, 5)
    with pytest.raises(RunLocked):
        run.roll_back()
    with pytest.raises(RunLocked):
        run.delete()
    assert run.rollbacks == 0 and run.config


def test_a_run_that_something_holds_open_is_whole_until_it_can_be_deleted(run, monkeypatch):
    save(run, 5)

    def held(source, target):
        raise PermissionError(13, "The process cannot access the file")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.files.replace", lambda source, target: held(source, target)
                        if source == run.path else os.replace(source, target))
        with pytest.raises(ValueError, match="run 'run' could not be deleted .The process cannot access") as caught:
            run.delete()
    assert "\n" not in str(caught.value)
    assert RunDirectory(run.path).config == run.config and [p.step for p in run.save_points()] == [5]
    run.delete()
    assert not run.path.exists() and os.listdir(run.path.parent) == []


def test_what_is_left_of_a_deletion_that_was_cut_short_goes_when_a_run_is_made(folder):
    old, young = (folder.parent / f".part-old-run-{name}" for name in ("1234", "5678"))
    for path in (old, young):
        (path / "state").mkdir(parents=True)
    os.utime(old, (time.time() - 3700,) * 2)
    make(folder)
    assert not old.exists() and young.is_dir(), "another process may be at it"


# -- comparing


def test_differences_are_graded(folder):
    old = config_for(folder)
    new = dataclasses.replace(
        old, name="other", model=ModelConfig(flux="/elsewhere/flux.safetensors", vae=old.model.vae),
        dataset=dataclasses.replace(old.dataset, resolution=512),
        optimizer=OptimizerConfig(kind="adan", lr=1e-4, betas=(0.98, 0.92, 0.99)),
        memory=MemoryConfig(blocks_to_swap=3), recipe=RecipeConfig(lr_schedule="cosine", schedule_steps=10))
    assert {d.name: d.grade for d in compare(old, new)} == {
        "model.flux": ASK, "dataset.resolution": ASK, "optimizer.kind": ASK, "optimizer.lr": MAY_CHANGE,
        "optimizer.betas": MAY_CHANGE, "memory.blocks_to_swap": MAY_CHANGE, "recipe.lr_schedule": MAY_CHANGE,
        "recipe.schedule_steps": MAY_CHANGE}
    assert "optimizer.lr was 3.5e-06 and is 0.0001" in [str(d) for d in compare(old, new)]
    assert compare(old, dataclasses.replace(old, name="other")) == []


def test_a_moved_model_is_the_same_model_and_another_architecture_is_refused(tiny, tmp_path):
    old, _, _ = tiny(name="a")
    moved = shutil.copy(old.model.flux, tmp_path / "renamed.safetensors")
    other, _, _ = tiny(name="b", params=dataclasses.replace(TINY, depth=2))

    def grades(flux: str) -> list[str]:
        return [d.grade for d in compare(old, dataclasses.replace(old, model=ModelConfig(flux=flux)))]

    assert grades(str(moved)) == []
    assert grades(other.model.flux) == [REFUSE]
    with open(moved, "r+b") as file:  # the same architecture, other weights
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    assert grades(str(moved)) == [ASK]


def test_update_says_what_changed(run):
    new = dataclasses.replace(run.config, optimizer=OptimizerConfig(lr=1e-5), name="whatever")
    assert run.update(new) == ["optimizer.lr"]
    assert run.config.optimizer.lr == 1e-5 and run.events()[-1]["changed"] == ["optimizer.lr"]
    assert run.update(run.config, {**MANIFEST, "fingerprint": "g"}) == ["dataset.json"]
    assert run.dataset["fingerprint"] == "g"
    count = len(run.events())
    assert run.update(run.config, run.dataset) == [] and len(run.events()) == count


def test_nothing_here_needs_torch():
    code = ("import sys; import trainer.run, trainer.client, trainer.protocol, trainer.cli, trainer.worker, "
            "trainer.cli.headless; print('torch' in sys.modules)")
    assert python(code).communicate()[0] == "False\n"

"""The history of a run: numbered lines that many append to, torn ones, and a disk that is full."""

import json
import subprocess
import threading
import time

import pytest
from runs import python

from trainer.run import RunDirectory


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


@pytest.mark.parametrize("line", [
    '"type": "step", "step": 2, "loos": 1.0, "lr": 1e-3', '"type": "step", "step": 2, "loss": 1.0',
                                  '"type": "eval", "step": 2', '"type": "validated", "loss": 1.0'])
def test_a_line_that_lacks_what_readers_rely_on_is_none_of_ours(run, line):
    run.append("step", step=1, loss=0.5, lr=1e-3, seconds=0.1)
    with open(run.path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(f'{{"n": 3, "t": 1.0, {line}}}\n')
    run.append("step", step=2, loss=0.4, lr=1e-3, seconds=0.1)
    for reader in (run, RunDirectory(run.path)):
        assert [e["n"] for e in reader.events()] == [1, 2, 4]
        assert (reader.status()["loss"], reader.losses()) == (0.4, [(1, 0.5), (2, 0.4)])


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


def test_a_history_that_cannot_be_is_one_line(run):
    for text, said in (("", "how the run began"),
                       ('{"n": 1, "t": 0, "type": "state", "state": "asleep"}\n', "unknown state 'asleep'")):
        (run.path / "events.jsonl").write_text(text)
        with pytest.raises(ValueError, match=f"events.jsonl .*{said}.*put it back") as caught:
            RunDirectory(run.path).transition("preparing")
        assert "\n" not in str(caught.value)


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

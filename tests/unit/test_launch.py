"""How a worker's process is started, and what its log says of its end."""

import os
import subprocess
import sys

import pytest
from runs import PACK
from workers import make

from trainer import launch
from trainer.client import open_run


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
@pytest.mark.parametrize("flags", [[], ["-s"]])
def test_the_environment_of_a_worker(tiny, tmp_path, given, policy, flags):
    run = make(tiny)
    code = ("import subprocess, sys\nfrom trainer import launch\nfrom trainer.run import RunDirectory\n"
            "real, seen = subprocess.Popen, {}\n"
            "idle = [sys.executable, '-c', '']\n"
            "subprocess.Popen = lambda command, **options: seen.update(options['env']) or real(idle)\n"
            "launch.start(RunDirectory(sys.argv[1])).wait(120)\n"
            "print(seen['OMP_WAIT_POLICY'], seen.get('PYTHONNOUSERSITE'))")
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "PYTHONNOUSERSITE")}
    if given:
        environment["OMP_WAIT_POLICY"] = given
    done = subprocess.run([sys.executable, *flags, "-c", code, run.path], cwd=PACK, env=environment,
                          capture_output=True, text=True)
    assert done.stdout == f"{policy} {'1' if flags else None}\n", done.stderr


def test_a_worker_that_nobody_waits_for_any_more_is_ended_before_it_has_loaded_anything(tiny, monkeypatch):
    child = launch.Child(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
    asked = []

    def give_up_later():
        asked.append(1)
        if len(asked) > 3:
            raise TimeoutError

    monkeypatch.setattr("trainer.launch.start", lambda *_: child)
    with pytest.raises(TimeoutError):
        open_run(make(tiny).path, check=give_up_later)
    assert child.wait(120) is not None


@pytest.mark.parametrize(("lines", "words"), [
    ("", ""),
    ("2026-01-01 00:00:00,000 INFO x: {start}\nTraceback (most recent call last):\n  File\nfoo.Bar: no\nmore\n",
     "foo.Bar: no"),
    ("Traceback (most recent call last):\n  File\nOld: no\n2026-01-01 00:00:00,000 INFO x: {start}\n", ""),
    ("2026-01-01 00:00:00,000 INFO x: {start}\n2026-01-01 00:00:00,000 ERROR x: a request failed\n"
     "Traceback (most recent call last):\n  File\nKeyError: 'x'\n2026-01-01 00:00:00,000 INFO x: on\n", ""),
    ("2026-01-01 00:00:00,000 INFO x: {start}\nFatal Python error: Aborted\n\nThread 0x1:\n  File\n",
     "Fatal Python error: Aborted"),
])
def test_last_words_are_those_of_the_newest_worker_at_its_end(tmp_path, lines, words):
    log = tmp_path / "worker.log"
    log.write_text(lines.format(start=launch.STARTED))
    assert launch.last_words(log) == words
    assert launch.last_words(tmp_path / "none") == ""

"""Workers as real processes on the tiny preset: killed, signalled, orphaned, met by several, and unable to begin."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from runs import PACK
from workers import SLOW, make, state_files, wait_for, wait_for_state

from trainer import launch
from trainer.client import WorkerDied, open_run
from trainer.loop import Trainer
from trainer.run import RunDirectory

MAIN = PACK / "trainer" / "__main__.py"


def pid_of(run: RunDirectory) -> int:
    return json.loads(run.address_file.read_text())["pid"]


def test_killed_in_the_middle_it_resumes_from_its_save_point_as_if_nothing_had_happened(tiny, launched):
    settings = {**SLOW, "recipe": {"batch_size": 4, "save_every_steps": 3}}
    run = make(tiny, name="killed", **settings)
    client = launched(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 5, 60)
    threading.Timer(0.5, lambda: os.kill(pid_of(run), signal.SIGKILL)).start()
    killed = time.monotonic() + 0.5
    with pytest.raises(WorkerDied, match=r"likely out of RAM \(killed\).*from its save point at step") as caught:
        while True:
            client.status(since=client.status()["last_event"], wait=30)
    assert time.monotonic() - killed < 2 and "\n" not in str(caught.value)
    status = run.status()
    saved, reached = status["save_point_step"], status["step"]
    assert status["state"] == "interrupted" and saved % 3 == 0 and saved <= reached
    assert client.status()["state"] == "interrupted"
    (run.path / "state" / ".part-step-000999-x").mkdir()

    client.train(reached + 2)  # the same client starts another
    wait_for_state(client, "finished")
    assert os.listdir(run.path / "state") == [f"step-{reached + 2:06d}"]
    assert [e["step"] for e in run.events() if e["type"] == "resumed"] == [saved]
    client.stop()

    whole = make(tiny, name="whole", **settings)
    trainer = Trainer(whole.config, whole.path, dataset=whole.dataset)
    reports = [trainer.train_step() for _ in range(reached + 2)]
    assert run.losses() == [(r.step, r.loss) for r in reports]
    point = whole.write_save_point(trainer.step, trainer.save)
    a, b = state_files(point.path), state_files(run.latest_save_point().path)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tiny, launched, number):
    run = make(tiny, **SLOW)
    client = launched(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2, 60)
    os.kill(pid_of(run), number)
    wait_for(lambda: not run.locked(), 120)
    status = run.status()
    assert status["state"] == "stopped" and status["save_point_step"] == status["step"] >= 2
    assert client._child.wait(120) == 0 and launch.ended_in_order(run.log_file)
    assert client.status()["state"] == "stopped"


def test_when_its_owner_is_killed_the_worker_saves_and_exits(tiny):
    run = make(tiny, **SLOW)
    code = ("import sys, time; from trainer.client import open_run\n"
            "client = open_run(sys.argv[1], owner=True); client.train(10_000)\n"
            "while client.status()['step'] < 2: time.sleep(0.05)\n"
            "print('training', flush=True); time.sleep(60)")
    parent = subprocess.Popen([sys.executable, "-c", code, run.path], cwd=PACK, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"training\n"
    worker = pid_of(run)
    if hasattr(os, "getsid"):
        assert os.getsid(worker) == worker != os.getsid(parent.pid)  # Ctrl-C in the parent's terminal does not reach it
    parent.kill()
    parent.wait()
    wait_for(lambda: not run.locked(), 120)
    status = run.status()
    assert status["state"] == "stopped" and status["save_point_step"] == status["step"] >= 2
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(worker, 0)
            time.sleep(0.05)


def test_two_who_open_a_run_at_once_meet_one_worker_and_a_second_worker_is_refused(tiny, launched):
    run = make(tiny)
    clients = []
    threads = [threading.Thread(target=lambda: clients.append(launched(run))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(clients) == 3 and len({c._address for c in clients}) == 1
    second = subprocess.run([sys.executable, MAIN, "worker", run.path], capture_output=True, text=True)
    assert second.returncode == launch.EXIT_LOCKED and "open in another process" in second.stderr
    clients[0].train(1)
    wait_for_state(clients[1], "finished")
    clients[2].stop()
    assert clients[0].status()["state"] == "finished"


def test_a_worker_starts_clean_wherever_it_is_started_from(tiny, launched, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.chdir(tmp_path)
    run = make(tiny)
    client = launched(RunDirectory("run"), idle_exit=1.0)
    environment = Path(f"/proc/{pid_of(run)}/environ")
    if environment.exists():
        assert b"ALLOC_CONF" not in environment.read_bytes() and b"PYTHONUTF8=1" in environment.read_bytes()
        assert os.readlink(f"/proc/{pid_of(run)}/cwd") != str(run.path)
    wait_for_state(client, "paused")
    wait_for(lambda: not run.locked(), 120, "the idle worker's end")
    assert client.evaluate()["step"] == 0  # and it is started again where it is needed
    with pytest.raises(ValueError, match="no run directory"):
        open_run(tmp_path)


def test_the_last_words_of_a_worker_are_in_the_error(tiny, launched):
    run = make(tiny)
    client = launched(run)
    wait_for_state(client, "paused")
    os.kill(pid_of(run), signal.SIGSEGV)
    with pytest.raises(WorkerDied, match="Fatal Python error: Segmentation fault"):
        client.evaluate()
    run.address_file.unlink()
    run.address_file.mkdir()  # where the next worker cannot say that it is there
    words = r"could not begin: .*worker\.json: (Is a directory|Permission denied|Access is denied)"
    with pytest.raises(WorkerDied, match=words):
        launched(run)


def test_a_run_whose_model_is_gone_says_so_and_lets_go(tiny, launched):
    run = make(tiny)
    flux = Path(run.config.model.flux)
    flux.rename(flux.with_suffix(".away"))
    client = launched(run)
    with pytest.raises(ValueError, match="flux.safetensors does not exist"):
        client.evaluate()
    assert "flux.safetensors" in wait_for_state(client, "failed")["error"]
    flux.with_suffix(".away").rename(flux)
    launched(run).train(1)  # whoever comes anew waits for it to end, and gets another
    status = wait_for_state(client, "finished")
    assert (status["step"], status["error"]) == (1, None)


def test_why_a_worker_could_not_begin_is_in_the_error(tiny, launched, monkeypatch):
    run = make(tiny)
    monkeypatch.setenv(launch.IDLE_MINUTES, "never")
    with pytest.raises(WorkerDied, match=r"could not begin: FLUX_FFT_IDLE_MINUTES is 'never': give a number") as caught:
        launched(run)
    assert "\n" not in str(caught.value)

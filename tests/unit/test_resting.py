"""What is told of a run that rests in memory: what it holds, and for how long; that it is done only at its target."""

import os
import signal

import pytest
from commands import here
from sessions import PAIRS, events, recipe, session
from workers import make, wait_for, wait_for_state

from trainer.live.opened import OpenedRun
from trainer.run import RunDirectory


def test_a_paused_run_tells_the_memory_that_it_still_holds_until_it_leaves(tiny, serve):
    run = make(tiny, **PAIRS)
    worker, client = serve(run, idle_exit=600.0)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    client.pause()
    status = RunDirectory(run.path).status()
    assert status["state"] == "paused" and status["ram_gb"] > 0 and status["idle_exit"] == 600
    assert status["vram_gb"] == 0 and status["waits_for"] is None
    assert f"holds {status['ram_gb']:g} GB of RAM until it has rested for 0:10:00" in here("status", run.path).stdout
    told = events(run, "memory")
    worker._session.park()
    assert events(run, "memory") == told, "told once for each time that it gives its VRAM back"
    client.train(10_000)
    wait_for(lambda: client.status()["state"] == "training")
    assert client.status()["idle_exit"] is None
    client.stop()
    assert (run.status()["ram_gb"], run.status()["idle_exit"]) == (None, None)


def test_a_finished_run_tells_it_once_it_gives_its_vram_back(tiny, serve):
    run = make(tiny, **PAIRS)
    _, client = serve(run, idle_park=0.2)
    client.train(1)
    wait_for_state(client, "finished")
    assert wait_for(lambda: run.status()["ram_gb"]) > 0


def test_a_worker_that_is_killed_holds_nothing_any_more(tiny, launched):
    run = make(tiny, **PAIRS)
    client = launched(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 1)
    client.pause()
    assert run.status()["ram_gb"] > 0
    os.kill(client._child._process.pid, signal.SIGKILL)
    client._child.wait(120)
    status = run.status()
    assert status["state"] == "interrupted" and status["ram_gb"] is None and status["idle_exit"] is None


@pytest.fixture
def done(tiny, serve):
    """A run that has finished at step 4, with a save point of step 2 too, and its client."""
    run = make(tiny, **recipe(keep_save_points=3))
    _, client = serve(run)
    for target in (2, 4):
        client.train(target)
        wait_for_state(client, "finished")
    return run, client


def test_a_finished_run_that_goes_back_is_paused_there(done):
    run, client = done
    assert client.roll_back(2) == 2
    assert (client.status()["state"], client.status()["step"]) == ("paused", 2)
    assert RunDirectory(run.path).status()["state"] == "paused"
    client.train(4)
    assert wait_for_state(client, "finished")["step"] == 4
    assert client.roll_back(4) == 4 and client.status()["state"] == "finished", "it is at its target all the same"


def test_it_is_so_after_its_worker_left_too(done, serve):
    run, client = done
    client.roll_back(2), client.stop()
    assert run.status()["state"] == "stopped"
    _, again = serve(run)
    assert wait_for_state(again, "paused", "finished")["state"] == "paused"


def test_killed_right_after_it_went_back_it_is_not_finished_either(done, serve, monkeypatch):
    run, client = done
    monkeypatch.setattr(OpenedRun, "transition", lambda *_, **__: None)  # no word comes after that of the roll-back
    client.roll_back(2), client.stop()
    monkeypatch.undo()
    assert run.status()["state"] == "interrupted"
    _, again = serve(run)
    assert wait_for_state(again, "paused", "finished")["step"] == 2 and again.status()["state"] == "paused"


def test_a_run_that_finds_its_last_save_point_damaged_is_not_finished_at_the_one_before(done, serve):
    run, client = done
    client.stop()
    assert run.status()["state"] == "finished"
    file = sorted(run.save_points()[-1].path.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    _, again = serve(run)
    assert wait_for_state(again, "paused", "finished")["step"] == 2 and again.status()["state"] == "paused"


def test_a_failed_run_that_goes_back_is_paused(tiny):
    run = make(tiny, **PAIRS)
    one = session(run)
    one.step(), one.save(), one.step()
    one.fail(ValueError("no"))
    one.roll_back()
    status = run.status()
    assert status["step"] == 1 and status["error"] is None
    assert one.state == "paused"

"""When a worker ends by itself, and what it leaves: idle time, its owner's leaving, a target at a terminal."""

import time

import torch
from workers import SLOW, make, wait_for, wait_for_state

from trainer.client import open_run


def test_an_idle_worker_gives_back_its_vram_then_saves_and_exits(tiny, serve):
    run = make(tiny)
    worker, client = serve(run, idle_park=0.3, idle_exit=2.0)
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    assert not worker._session.parked
    wait_for(lambda: worker._session.parked, 120)
    inputs = (torch.randn(1, 16, 8, 8), torch.rand(1), torch.randn(1, 6, 128), torch.randn(1, 64), torch.ones(1))
    client.predict(*inputs)
    assert not worker._session.parked
    wait_for(lambda: not run.locked(), 120)  # asking for its status all the time keeps no worker alive
    status = run.status()
    assert (status["state"], status["save_point_step"]) == ("stopped", 2)


def test_nothing_trained_is_nothing_to_save(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    wait_for_state(client, "paused")
    client.stop()
    assert run.status()["state"] == "stopped" and run.save_points() == []


def test_looking_at_a_finished_run_leaves_it_finished(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    client.stop()
    assert run.status()["state"] == "finished"
    _, client = serve(run)
    wait_for_state(client, "finished")
    client.evaluate()
    client.stop()
    assert run.status()["state"] == "finished"


def test_goodbye_and_other_clients_leaving_do_not_end_it(tiny, serve):
    run = make(tiny)
    worker, _ = serve(run)
    with open_run(run.path, launch=False, owner=True):
        pass
    open_run(run.path, launch=False)._forget()  # gone without a word, but no owner
    time.sleep(0.3)
    assert not worker.quitting
    owner = open_run(run.path, launch=False, owner=True)
    owner._forget()  # the connection drops, as when its process ends
    wait_for(lambda: not run.locked(), 120)


def test_a_worker_at_a_terminal_outlives_comfyui_and_ends_at_its_target(tiny, serve):
    run = make(tiny, **SLOW)
    worker, _ = serve(run, foreground=True, until=10_000)
    owner = open_run(run.path, launch=False, owner=True)
    wait_for(lambda: owner.status()["step"] >= 1)
    owner._forget()
    at = run.status()["step"]
    wait_for(lambda: run.status()["step"] > at + 1)
    other = open_run(run.path, launch=False)
    other.train(run.status()["step"] + 2)
    wait_for(lambda: not run.locked(), 60)
    assert run.status()["state"] == "finished"

"""A run that rests on its way, for a client's pictures: what others may do meanwhile, and how it goes on."""

import threading

import pytest
from commands import here
from sessions import PAIRS
from workers import make, wait_for, wait_for_state

from trainer.client import open_run
from trainer.progress import Bar
from trainer.run import RunDirectory
from trainer.worker import Worker


def resting(run, serve, at=3, until=8, **options):
    """A worker whose run rests at step ``at`` of ``until``, and its client."""
    worker, client = serve(run, **options)
    client.train(until, pause_at=at)
    wait_for(lambda: client.status()["on_the_way"] == at)
    return worker, client


def test_giving_back_the_vram_takes_nothing_from_what_it_is_to_do(tiny, serve):
    worker, client = resting(make(tiny, **PAIRS), serve)
    worker._pauses.add(6)  # another client's
    client.park()
    status = client.status()
    assert worker._session.parked and (status["state"], status["on_the_way"], status["step"]) == ("paused", 3, 3)
    client.train(8)
    assert wait_for(lambda: client.status()["on_the_way"]) == 6


def test_a_run_in_training_is_not_parked(tiny, serve):
    worker, client = serve(make(tiny, **PAIRS))
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 1)
    client.park()
    assert client.status()["state"] == "training" and not worker._session.parked


def test_cancel_while_it_rests_ends_that_it_would_go_on(tiny, serve):
    worker, client = resting(make(tiny, **PAIRS), serve)
    client.park()
    client.pause()
    assert client.status()["on_the_way"] is None and client.status()["state"] == "paused" and not worker._pauses


def test_another_client_lets_the_pictures_be_taken_first(tiny, serve):
    run = make(tiny, **PAIRS)
    _, client = resting(run, serve)
    let, said = threading.Event(), []

    def other() -> None:
        with open_run(run.path, launch=False) as mine:
            mine.let_sample(say=said.append)
            let.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert not let.wait(0.6)
    client.train(8)
    thread.join(120)
    assert let.is_set() and said == ["waiting for another program's pictures of step 3"]


def test_it_waits_only_so_long_and_not_where_nothing_is_waited_for(tiny, serve):
    _, client = resting(make(tiny, **PAIRS), serve)
    client.let_sample(patience=0.1)
    assert client.status()["on_the_way"] == 3, "whoever wanted the pictures has gone: it is the caller's to go on"
    client.pause()
    said = []
    client.let_sample(patience=1e6, say=said.append)
    assert said == []


def test_a_terminal_that_waits_for_others_pictures_says_so_and_ctrl_c_ends_only_that(tiny, serve, monkeypatch):
    run = make(tiny, **PAIRS)
    _, client = resting(run, serve)

    def ctrl_c(bar: Bar, text: str) -> None:
        if text == "waiting for another program's pictures of step 3":
            raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "say", ctrl_c)
    assert here("train", run.path, "--until", 8).returncode == 130
    status = client.status()
    assert (status["state"], status["on_the_way"], status["target"]) == ("paused", 3, 8)
    client.train(8)
    assert wait_for_state(client, "finished")["step"] == 8


def test_whoever_waits_may_give_up(tiny, serve):
    run = make(tiny, **PAIRS)
    resting(run, serve)

    def give_up() -> None:
        raise RuntimeError("given up")

    with open_run(run.path, launch=False) as other:
        other._check = give_up
        with pytest.raises(RuntimeError, match="given up"):
            other.let_sample()


def test_a_terminals_run_goes_on_by_itself_when_nobody_comes_for_the_pictures(tiny, serve, monkeypatch):
    monkeypatch.setattr("trainer.worker.ON_THE_WAY", 0.2)
    run = make(tiny, **PAIRS)
    worker, client = serve(run, foreground=True, until=8)
    wait_for(lambda: worker._session.trainer is not None)
    client.train(8, pause_at=3)
    wait_for(lambda: any(e.get("on_the_way") for e in run.events()))
    client.close()  # as if its process had died
    wait_for(lambda: run.status()["state"] == "finished" and run.status()["step"] == 8)


def test_a_terminals_run_that_is_paused_by_will_stays_so(tiny, serve, monkeypatch):
    monkeypatch.setattr("trainer.worker.ON_THE_WAY", 0.1)
    worker, client = serve(make(tiny, **PAIRS), foreground=True)
    client.train(8, pause_at=3)
    client.pause()
    wait_for(lambda: worker._session.parked)
    threading.Event().wait(1.0)
    assert wait_for_state(client, "paused")["on_the_way"] is None


def test_a_run_that_is_told_to_end_where_it_would_go_on_by_itself_is_saved(tiny, serve, monkeypatch):
    monkeypatch.setattr("trainer.worker.ON_THE_WAY", 0.0)
    run = make(tiny, **PAIRS)
    worker, client = serve(run, foreground=True)
    go_on = worker._go_on

    def late() -> None:
        worker.quit("the machine shuts down")
        go_on()

    worker._go_on = late
    client.train(8, pause_at=3)
    wait_for(lambda: not run.locked())
    assert run.status()["state"] == "stopped" and run.status()["save_point_step"] == 3


def saved_at_3(tiny) -> RunDirectory:
    run = make(tiny, **PAIRS)
    worker = Worker(run, until=3, foreground=True)
    worker.serve()
    return run


def asked_while_it_loads(run, serve, *wishes):
    """A worker that is asked to train, and to pause, before it has loaded its run."""
    loaded = threading.Event()

    class Slow(Worker):
        def _load(self) -> None:
            loaded.wait(120)
            super()._load()

    worker, client = serve(run, kind=Slow)
    for until, at in wishes:
        client.train(until, pause_at=at)
    loaded.set()
    return worker, client


def test_a_run_that_is_loaded_for_pictures_of_its_step_rests_there_and_forgets_no_others(tiny, serve):
    worker, client = asked_while_it_loads(saved_at_3(tiny), serve, (8, 3), (8, 6))
    assert wait_for(lambda: client.status()["on_the_way"]) == 3 and client.status()["target"] == 8
    client.train(8)
    assert wait_for(lambda: client.status()["on_the_way"]) == 6
    client.train(8)
    assert wait_for_state(client, "finished")["step"] == 8


def test_a_run_that_is_loaded_for_pictures_of_its_target_is_finished(tiny, serve):
    _, client = asked_while_it_loads(saved_at_3(tiny), serve, (3, 3))
    assert wait_for_state(client, "finished")["on_the_way"] is None

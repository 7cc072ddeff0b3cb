"""Training as messages to a worker in this process: targets, pauses, stops, save points, new settings."""

import threading
import time

import pytest
import torch
from workers import SLOW, make, state_files, wait_for, wait_for_state

from trainer.client import open_run
from trainer.config import RunConfig
from trainer.run import RunDirectory


def test_a_run_trains_to_its_target_and_nothing_happens_the_second_time(tiny, serve):
    run = make(tiny)
    assert run.status()["state"] == "created"
    _, client = serve(run)
    client.train(4)
    status = wait_for_state(client, "finished")
    assert (status["step"], status["target"], status["save_point_step"], status["error"]) == (4, 4, 4, None)
    assert status["loss"] == run.losses()[-1][1] and status["lr"] == 1e-3 and status["seconds_per_step"] > 0
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4]
    assert [s for s, _ in run.evals()] == [0, 4] and run.evals()[1][1] < run.evals()[0][1]
    events = run.events()
    order = [e.get("state") or e["type"] for e in events]
    assert [o for o in order if o != "paused"] == [
        "created", "preparing", "planned", "training", "eval", *["step"] * 4, "saved", "eval", "finished"]
    client.train(4), client.train(2)
    time.sleep(0.3)
    assert run.events() == events
    client.train(6)
    assert wait_for_state(client, "finished")["step"] == 6
    assert [p.step for p in run.save_points()] == [6]


def test_status_waits_for_news_and_hands_over_what_is_new(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    wait_for_state(client, "paused")
    seen = client.status()["last_event"]
    started = time.monotonic()
    assert client.status(since=seen, wait=0.4)["events"] == []
    assert 0.3 < time.monotonic() - started < 2
    client.train(3)
    collected = []
    while not collected or collected[-1].get("state") != "finished":
        news = client.status(since=seen, wait=10)["events"]
        assert news, "the wait ended without news"
        collected += news
        seen = news[-1]["n"]
    assert [e["n"] for e in collected] == list(range(collected[0]["n"], seen + 1))
    assert [e["step"] for e in collected if e["type"] == "step"] == [1, 2, 3]
    other = threading.Timer(0.2, lambda: RunDirectory(run.path).append("sample", file="x.png"))  # as ComfyUI does
    other.start()
    assert [e["type"] for e in client.status(since=seen, wait=10)["events"]] == ["sample"]


def test_pausing_stops_within_a_step_and_writes_nothing(tiny, serve):
    run = make(tiny, **SLOW)
    worker, client = serve(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    call, asked_at = worker._jobs.call, []
    worker._jobs.call = lambda work: asked_at.append(worker._session.trainer.step) or call(work)
    client.pause()
    at = client.status()
    assert at["step"] <= asked_at[0] + 1  # the step that was under way when the request was taken
    assert at["state"] == "paused" and worker._session.parked
    time.sleep(0.3)
    assert client.status()["step"] == at["step"] and run.save_points() == []
    client.train(at["step"] + 2)
    assert wait_for_state(client, "finished")["step"] == at["step"] + 2
    client.pause()
    assert client.status()["state"] == "finished"


def test_pausing_on_the_way_for_a_picture(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(6, pause_at=2)
    assert (wait_for_state(client, "paused")["step"], run.save_points()) == (2, [])
    assert (client.status()["target"], len(run.evals())) == (6, 1)
    client.train(6, pause_at=2)
    assert (client.status()["state"], client.status()["step"]) == ("paused", 2)
    client.train(6, pause_at=4)
    assert wait_for(lambda: client.status()["state"] == "paused" and client.status()["step"]) == 4
    client.train(6)
    assert wait_for_state(client, "finished")["step"] == 6


def test_the_pauses_that_two_clients_ask_for_stand_side_by_side(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    with open_run(run.path, launch=False) as other:
        client.train(8, pause_at=4)
        other.train(8, pause_at=2)
        status = wait_for_state(client, "paused")
        assert (status["step"], status["on_the_way"]) == (2, 2)
        other.train(8, pause_at=6)
        wait_for(lambda: client.status()["on_the_way"] == 4)
        client.train(8)
        wait_for(lambda: client.status()["on_the_way"] == 6)
        client.pause()
        assert client.status()["on_the_way"] is None and client.status()["state"] == "paused"
        other.train(8)
        status = wait_for_state(other, "finished")
        assert status["step"] == 8 and status["on_the_way"] is None


def test_stopping_saves_frees_the_run_and_training_goes_on_later(tiny, serve):
    run = make(tiny, **SLOW)
    _, client = serve(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    client.stop()
    status = run.status()
    assert status["state"] == "stopped" and status["save_point_step"] == status["step"] >= 2
    assert not run.locked() and not run.address_file.exists()
    assert client.status()["state"] == "stopped"  # read from the disk, without a worker
    client.stop(), client.pause()
    at = status["step"]
    _, client = serve(run)
    assert wait_for_state(client, "paused")["step"] == at
    client.train(at + 1)
    wait_for_state(client, "finished")
    assert [s for s, _ in run.losses()] == list(range(1, at + 2)) and len(run.evals()) == 2


def test_stopped_and_resumed_equals_never_stopped(tiny, serve):
    whole = make(tiny, name="whole")
    _, client = serve(whole)
    client.train(6)
    wait_for_state(client, "finished")
    parts = make(tiny, name="parts")
    for target in (2, 5, 6):
        _, client = serve(parts)
        client.train(target)
        wait_for_state(client, "finished")
        client.stop()
    assert parts.status()["state"] == "finished"
    assert parts.losses() == whole.losses()
    a, b = (state_files(r.latest_save_point().path) for r in (whole, parts))
    assert a.keys() == b.keys() and len(a) > 4
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_save_points_by_steps_and_by_minutes(tiny, serve):
    run = make(tiny, name="steps", recipe={"save_every_steps": 3})
    _, client = serve(run)
    client.train(7)
    wait_for_state(client, "finished")
    assert [e["step"] for e in run.events() if e["type"] == "saved"] == [3, 6, 7]
    run = make(tiny, name="minutes", recipe={"save_every_minutes": 1e-6})
    _, client = serve(run)
    client.train(3)
    wait_for_state(client, "finished")
    assert [e["step"] for e in run.events() if e["type"] == "saved"] == [1, 2, 3]
    client.save()
    assert len([e for e in run.events() if e["type"] == "saved"]) == 3  # there is one of this step


def test_new_settings_are_taken_at_the_next_training(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    old = run.config
    new = RunConfig(**{**vars(old), "optimizer": type(old.optimizer)(**{**vars(old.optimizer), "lr": 1e-5})})
    run.update(new)
    client.train(3)
    assert wait_for_state(client, "finished")["lr"] == 1e-5
    assert [s for s, _ in run.losses()] == [1, 2, 3]


@pytest.mark.parametrize("until", [0, -3, 2.5, "7", None, True])
def test_a_target_that_is_none_is_refused(tiny, serve, until):
    _, client = serve(make(tiny))
    with pytest.raises(ValueError, match="until is .* whole number"):
        client.train(until)

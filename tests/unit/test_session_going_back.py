"""Going back by the user's will while a run trains: where to, and from what cannot be read or is held open."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from sessions import PAIRS, events, masters, recipe, session
from states import same
from workers import make, state_files, wait_for, wait_for_state


def test_going_back_in_a_living_worker(tiny, serve):
    run = make(tiny, **recipe(keep_save_points=3))
    _, client = serve(run)
    for target in (2, 4):
        client.train(target)
        wait_for_state(client, "finished")
    point = state_files(run.save_points()[0].path)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 6)
    with pytest.raises(ValueError, match=r"no save point of step 3"):
        client.roll_back(3)
    assert client.roll_back(2) == 2
    status = client.status()
    assert (status["state"], status["step"], status["save_point_step"], status["rollbacks"]) == ("paused", 2, 2, 1)
    assert [s for s, _ in run.losses()] == [1, 2] and status["unsaved_seconds"] == 0
    client.train(4)
    wait_for_state(client, "finished")
    first, again = (events(run, "step")[i]["loss"] for i in (2, -2))
    assert first != again, "a run that went back repeats no noise"
    assert client.roll_back(0) == 0 and run.save_points() == []
    client.train(2)
    wait_for_state(client, "finished")
    assert not all(torch.equal(a, b) for a, b in zip(
        point.values(), state_files(run.save_points()[0].path).values(), strict=True))


def test_a_step_that_cannot_be_gone_back_to_stops_no_training(tiny, serve):
    run = make(tiny, **PAIRS)
    _, client = serve(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    with pytest.raises(ValueError, match="no save point of step 77"):
        client.roll_back(77)
    at = client.status()["step"]
    wait_for(lambda: client.status()["step"] > at)
    assert client.status()["state"] == "training"


def test_a_checkpoint_newer_than_the_save_point_is_gone_on_from_by_choice(tiny, serve):
    run = make(tiny, **recipe(checkpoint_every_steps=2))
    worker, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    client.train(10_000, pause_at=5)
    wait_for(lambda: client.status()["on_the_way"] == 5)
    assert [e["step"] for e in events(run, "checkpoint")] == [2, 4]
    with pytest.raises(ValueError, match="fresh"):
        client.roll_back(4)
    assert client.roll_back(4, fresh=True) == 4
    kept = load_file(run.checkpoints()[-1].path)
    names = {p.name: p.parameter for s in worker._session.trainer.stages for g in s.arena.groups for p in g.pieces}
    assert kept.keys() == names.keys()
    assert all(torch.equal(kept[name], names[name].detach().to(kept[name].dtype)) for name in kept)
    assert run.status()["resume_step"] == 4
    client.train(6)
    assert wait_for_state(client, "finished")["save_point_step"] == 6


# -- what cannot be read, or is held open


def damage(folder_or_file) -> str:
    """Turn a bit round in a weights file, or in the largest file of a save point; returns its name."""
    some = [folder_or_file] if folder_or_file.is_file() else folder_or_file.glob("*.safetensors")
    file = max(some, key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-100] ^= 0xFF
    file.write_bytes(data)
    return file.name


def test_going_back_to_a_damaged_save_point_is_refused_and_the_run_has_what_it_goes_on_from(tiny, serve):
    run = make(tiny, **recipe(keep_save_points=3))
    worker, client = serve(run)
    for target in (2, 4):
        client.train(target)
        wait_for_state(client, "finished")
    before = masters(worker._session)
    name = damage(run.save_points()[0].path)
    with pytest.raises(ValueError, match=name) as error:
        client.roll_back(2)
    assert "\n" not in str(error.value) and events(run, "rolled_back") == []
    assert same(masters(worker._session), before) and client.status()["step"] == 4
    client.train(5)
    assert wait_for_state(client, "finished")["step"] == 5


def test_an_engine_that_has_read_damaged_weights_saves_nothing(tiny, serve):
    run = make(tiny, **PAIRS)
    worker, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    client.train(10_000, pause_at=3)
    wait_for(lambda: client.status()["on_the_way"] == 3)
    name = damage(run.save_points()[0].path)
    with pytest.raises(ValueError, match=f"{name}.*no other save point"):
        client.roll_back()
    wait_for(lambda: not run.locked())
    assert worker._session.trainer.torn and [p.step for p in run.save_points()] == [2]
    assert events(run, "saved")[-1]["step"] == 2 and run.status()["state"] == "stopped"


def test_without_a_save_point_a_damaged_checkpoint_gives_way_to_the_model(tiny):
    run = make(tiny, **recipe(checkpoint_every_steps=1))
    one = session(run)
    before = masters(one)
    one.step(), one.step()
    path = run.checkpoints()[0].path
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 5000)
    assert [c.step for c in run.checkpoints(damaged=True)] == [1, 2]
    one.run.find_source = lambda *_, **__: dataclasses.replace(run.checkpoints(damaged=True)[0])
    with pytest.raises(ValueError, match=path.name):
        one.roll_back(1, fresh=True)
    assert not one.trainer.torn and one.trainer.step == 0 and same(masters(one), before)
    assert run.status()["step"] == 0 and run.losses() == []
    assert one.step() == 1


def test_a_roll_back_that_something_holds_up_leaves_the_engine_where_the_run_is(tiny, monkeypatch):
    run = make(tiny, **recipe(keep_save_points=3))
    one = session(run)
    for _ in range(2):
        one.step(), one.save()
    at_two = masters(one)

    def held(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.saves.savepoints.remove_later", held)
        with pytest.raises(ValueError, match="cannot go back to step 1 yet.*Permission denied"):
            one.roll_back(1)
    assert one.trainer.step == run.status()["step"] == 2 and same(masters(one), at_two)
    assert one.trainer.rollbacks == run.rollbacks == 1
    assert one.roll_back(1) == 1 and [p.step for p in run.save_points()] == [1]


def test_a_signal_while_a_run_goes_back_waits_for_that(tiny, serve, monkeypatch):
    run = make(tiny, **recipe(keep_save_points=2))
    worker, client = serve(run)
    for target in (1, 2):
        client.train(target)
        wait_for_state(client, "finished")
    trainer = worker._session.trainer
    load = trainer.load

    def interrupted(source):
        worker._note_signal("SIGTERM")
        return load(source)

    monkeypatch.setattr(trainer, "load", interrupted)
    assert client.roll_back(1) == 1
    wait_for(lambda: not run.locked())
    assert worker.quitting == "SIGTERM" and run.rollbacks == 1 and [p.step for p in run.save_points()] == [1]

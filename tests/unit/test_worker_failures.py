"""Failures that a worker outlives: a loss that is no number, a save that is refused."""

import pytest
import torch
from sessions import poison
from workers import make, wait_for_state

from trainer.loop import Trainer


def test_a_loss_that_is_no_number_stops_the_run_before_any_weight_changes(tiny, serve):
    run = make(tiny, shapes=[(8, 8)] * 6, recipe={"batch_size": 2})
    _, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    client.stop()
    from trainer.data.order import Order

    shapes = [(8, 8)] * 6
    third = Order(shapes, 2, 0).batch(3)[0]
    (name,) = poison(run, third)
    _, client = serve(run)
    inputs = (torch.randn(1, 16, 8, 8), torch.rand(1), torch.randn(1, 6, 128), torch.randn(1, 64), torch.ones(1))
    client.train(10)
    status = wait_for_state(client, "failed")
    assert status["step"] == 2 and "step 3" in status["error"] and name in status["error"]
    good = Trainer(run.config, run.path, dataset=run.dataset)
    good.load(run.latest_save_point().path)
    good.train_step()
    assert torch.equal(client.predict(*inputs), good.predict(*inputs))
    assert client.save() == 2 and run.status()["state"] == "failed"
    client.train(10)
    assert "step 3" in wait_for_state(client, "failed")["error"]
    client.stop()
    assert run.status()["state"] == "failed" and run.status()["save_point_step"] == 2


def test_a_save_that_fails_is_told_and_the_run_waits_for_room(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    # A file where the folder of the new save point is to be made: the system refuses, as it does on a full disk.
    state = run.path / "state"
    state.rename(run.path / "kept")
    state.write_text("")
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    with pytest.raises(ValueError, match="save point of step 2 could not be written"):
        client.stop()
    assert client.status()["state"] == "paused"
    client.train(3)
    assert "could not be written" in wait_for_state(client, "failed")["error"]
    state.unlink()
    (run.path / "kept").rename(state)
    assert [p.step for p in run.save_points()] == [1]
    client.train(3)
    assert wait_for_state(client, "finished")["save_point_step"] == 3

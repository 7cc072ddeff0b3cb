"""A run with its engine: what is noted of a step, and how it takes new settings and old weights."""

import pytest
import torch
from workers import make, wait_for_state

from trainer.session import Session


def session(tiny, told=None, **settings) -> Session:
    made = Session(make(tiny, **settings), watch=(told if told is not None else []).append)
    made.begin()
    made.use(made.load())
    made.transition("training", target=10)
    return made


def poison(one: Session, *stages: str) -> None:
    """Have the next step's gradients of these stages be infinite."""
    for stage in one.trainer.stages:
        if stage.name in stages:
            arena = stage.arena
            take = arena.take_gradients

            def infinite(g, add, arena=arena, take=take):
                arena.take_gradients = take
                take([g[0] * float("inf"), *g[1:]], add=add)

            arena.take_gradients = infinite


def test_gradients_that_are_no_numbers_are_noted_and_stop_the_run(tiny, serve):
    run = make(tiny)
    worker, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    poison(worker._session, "double_blocks.0")
    client.train(10)
    status = wait_for_state(client, "failed")
    assert status["step"] == 2 and "step 2 " in status["error"] and "double_blocks.0 " in status["error"]
    assert ".png" in status["error"] and "learning rate" in status["error"] and "\n" not in status["error"]
    first, second = [e for e in run.events() if e["type"] == "step"]
    assert "not_finite" not in first and second["not_finite"] == ["double_blocks.0"]
    assert client.save() == 2  # what there is, is whole
    client.train(3)
    assert wait_for_state(client, "finished")["step"] == 3
    assert "not_finite" not in run.events()[-4]


def test_the_device_is_waited_for_once_to_ask_for_every_stage(tiny, monkeypatch):
    one = session(tiny)
    asked = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda *_: pytest.fail("a wait for one flag"))
    real = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors: asked.append(len(tensors)) or real(tensors))
    one.trainer.updated = [s.name for s in one.trainer.stages]
    for stage in one.trainer.stages:
        for group in stage.arena.groups:
            group.finite = torch.ones((), dtype=torch.bool)
    assert one.trainer._report().not_finite == () and len(asked) == 1

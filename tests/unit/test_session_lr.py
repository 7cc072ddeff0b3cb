"""A learning rate that is set while a run trains."""

import dataclasses

import pytest
from sessions import PAIRS, events, masters, recipe, session
from states import same
from workers import make, wait_for_state

from trainer.live.session import with_lr


def test_a_learning_rate_is_taken_live_kept_and_superseded_by_the_settings(tiny, serve):
    run = make(tiny, **recipe(warmup_steps=0))
    _, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    client.set_lr(2e-4)
    client.train(3)
    assert wait_for_state(client, "finished")["lr"] == 2e-4
    (told,) = events(run, "lr")
    assert (told["step"], told["lr"]) == (2, 2e-4) and run.status()["lr_set"] == 2e-4
    client.stop()
    _, client = serve(run)
    client.train(4)
    assert wait_for_state(client, "finished")["lr"] == 2e-4

    def update(part: str, **values):
        config = run.config
        run.update(dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **values)}))

    update("recipe", save_every_steps=50)
    client.train(5)
    assert wait_for_state(client, "finished")["lr"] == 2e-4, "another setting does not touch it"
    update("optimizer", lr=5e-4)
    client.train(6)
    assert wait_for_state(client, "finished")["lr"] == 5e-4
    assert run.status()["lr_set"] is None


def test_a_live_learning_rate_is_as_one_in_the_settings(tiny):
    live, plain = (session(make(tiny, name=name, **PAIRS)) for name in ("live", "plain"))
    for one in (live, plain):
        one.step()
    live.set_lr(1e-4)
    plain.run.update(with_lr(plain.run.config, 1e-4))
    assert plain.take_description() and not live.described_anew
    for one in (live, plain):
        one.step(), one.step()
    assert same(masters(live), masters(plain)) and live.run.losses() == plain.run.losses()


@pytest.mark.parametrize("lr", [-1e-4, 1.5, float("nan"), "fast", None, True])
def test_what_is_no_learning_rate_is_refused_in_one_line(tiny, serve, lr):
    run = make(tiny, **PAIRS)
    _, client = serve(run)
    with pytest.raises(ValueError, match="learning rate is") as error:
        client.set_lr(lr)
    assert "\n" not in str(error.value) and events(run, "lr") == []

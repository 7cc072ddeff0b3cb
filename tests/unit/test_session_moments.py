"""Moments of zero on a run's weights: by the user's will, or for another optimizer."""

import dataclasses

import pytest
from sessions import PAIRS, masters, session
from states import same
from workers import make, wait_for_state

from trainer.live.session import Session


def test_fresh_moments_are_zero_and_the_weights_stay(tiny, serve):
    run = make(tiny, optimizer={"weight_precision": "split"}, **PAIRS)
    worker, client = serve(run)
    client.train(3)
    wait_for_state(client, "finished")
    before = masters(worker._session)
    assert client.roll_back(fresh=True) == 3
    one = worker._session
    assert same(masters(one), before) and one.trainer.since == 3
    moments = [t for s in one.trainer.stages for g in s.arena.groups for n, t in g.storage.items() if "exp_avg" in n]
    assert moments and not any(t.any() for t in moments)
    client.train(5)
    wait_for_state(client, "finished")
    client.stop()
    # Resumed from a save point that was made after it, the bias corrections still count from there.
    again = Session(run)
    again.begin()
    again.use(again.load())
    assert again.trainer.since == 3 and again.trainer.step == 5


@pytest.mark.parametrize("other", [
    {"kind": "adan", "betas": (0.98, 0.92, 0.99)},
    {"state_format": "f24"},
    {"weight_precision": "stochastic"},
])
def test_another_optimizer_goes_on_from_the_runs_weights_with_moments_of_zero(tiny, serve, other):
    run = make(tiny, optimizer={"weight_precision": "split"}, **PAIRS)
    worker, client = serve(run)
    client.train(3)
    wait_for_state(client, "finished")
    before = masters(worker._session)
    client.stop()
    config = run.config
    new = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **other))
    run.update(new)
    refused = Session(run)
    refused.begin()
    with pytest.raises(ValueError, match="another optimizer"):
        refused.load()
    refused.transition("stopped")

    assert run.renew_moments() == 3 and run.rollbacks == 0
    worker, client = serve(run)
    wait_for_state(client, "paused", "finished")
    one = worker._session
    after = masters(one)
    ties = sum(int((a != b).sum()) for a, b in zip(before.values(), after.values(), strict=True))
    assert ties == 0 or ("weight_precision" in other and ties < 1e-4 * sum(t.numel() for t in after.values()))
    assert (one.trainer.step, one.trainer.since) == (3, 3)
    moments = [t for s in one.trainer.stages for g in s.arena.groups for n, t in g.storage.items() if "exp_avg" in n]
    assert moments and not any(t.any() for t in moments)
    client.train(5)
    assert wait_for_state(client, "finished")["step"] == 5
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4, 5]
    client.stop()
    again = Session(run)
    again.begin()
    again.use(again.load())
    assert (again.trainer.step, again.trainer.since) == (5, 3)


def test_moments_of_a_run_that_was_never_saved_are_zero_as_they_are(tiny):
    run = make(tiny, **PAIRS)
    assert run.renew_moments() == 0
    assert session(run).step() == 1

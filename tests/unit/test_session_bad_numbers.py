"""Losses and gradients that are no numbers, and memory that is too little: batches left out, going on or back."""

import pytest
import torch
from sessions import SHAPES, events, infinite_gradients, masters, poison, recipe, session
from states import same
from workers import make, wait_for, wait_for_state

from trainer.data.order import Order, batch_number
from trainer.live.session import Session
from trainer.loop import Trainer

# -- batches that are left out


@pytest.mark.parametrize("skipped", [(), (1,), (3,), (3, 4), (1, 2, 3), (2, 5, 9), (7, 8)])
def test_a_batch_left_out_costs_no_other_and_repeats_none(skipped):
    numbers = [batch_number(step, skipped) for step in range(1, 15)]
    assert numbers == [n for n in range(1, 30) if n not in skipped][:14]


def test_what_was_trained_before_is_the_same_whatever_is_left_out_later():
    known = ()
    for failed_at in (5, 5, 9):
        before = [batch_number(step, known) for step in range(1, failed_at)]
        known = tuple(sorted((*known, batch_number(failed_at, known))))
        assert [batch_number(step, known) for step in range(1, failed_at)] == before


# -- bad numbers


def test_bad_numbers_roll_back_and_leave_the_batch_out(tiny, serve):
    twice = [(8, 8)] * 12  # so that no picture comes again
    run = make(tiny, **recipe(on_bad_numbers="roll back", save_every_steps=2) | {"shapes": twice})
    poison(run, Order(twice, 2, 0).batch(3)[0])
    _, client = serve(run)
    client.train(4)
    assert wait_for_state(client, "finished")["step"] == 4
    (back,) = events(run, "rolled_back")
    assert (back["step"], back["why"], back["skipped"]) == (2, "bad numbers", 3)
    assert run.skipped == (3,) and run.rollbacks == 1
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4]
    client.stop()

    # The third and fourth steps are those of the fourth and fifth batch, with the noise of a run that went back.
    other = make(tiny, name="other", **recipe() | {"shapes": twice})
    one = session(other)
    one.step(), one.step()
    one.trainer.rollbacks, one.trainer.skipped = 1, (3,)
    one.step(), one.step()
    assert run.losses() == other.losses()
    again = Session(run)
    again.begin()
    assert same(masters(one), _loaded(again))
    assert again.trainer.skipped == (3,) and again.trainer.rollbacks == 1


def _loaded(one: Session) -> dict[str, torch.Tensor]:
    one.use(one.load())
    return masters(one)


def test_without_a_save_point_it_goes_back_to_the_models_weights(tiny, serve):
    run = make(tiny, **recipe(on_bad_numbers="roll back"))
    poison(run, Order(SHAPES, 2, 0).batch(2)[1])
    _, client = serve(run)
    client.train(3)
    assert wait_for_state(client, "finished")["step"] == 3
    assert [(e["step"], e["skipped"]) for e in events(run, "rolled_back")] == [(0, 2)]
    other = make(tiny, name="other", **recipe())
    one = session(other)
    one.trainer.rollbacks, one.trainer.skipped = 1, (2,)
    for _ in range(3):
        one.step()
    assert run.losses() == other.losses()


def test_it_goes_back_three_times_in_a_row_at_most_and_further_when_told_to_go_on(tiny, serve):
    run = make(tiny, **recipe(on_bad_numbers="roll back"))
    poison(run, *range(6))
    _, client = serve(run)
    client.train(3)
    status = wait_for_state(client, "failed")
    assert "went back 3 times" in status["error"] and "\n" not in status["error"]
    assert len(events(run, "rolled_back")) == 3 and run.skipped == (1, 2, 3)
    client.train(3)
    wait_for(lambda: len(events(run, "rolled_back")) == 6)
    assert "went back 3 times" in wait_for_state(client, "failed")["error"]


def test_a_new_save_point_begins_the_count_anew(tiny):
    run = make(tiny, **recipe(on_bad_numbers="roll back"))
    one = session(run)
    one.step(), one.save()
    for number in (1, 2):
        one._bad_numbers("bad", 90 + number)
        assert one._tries() == number
    one.step(), one.save()
    assert one._tries() == 0
    one._bad_numbers("bad", 95)
    one.roll_back()  # the user's own
    assert one._tries() == 0


@pytest.mark.parametrize("policy", ["stop", "roll back"])
def test_gradients_that_are_no_numbers_are_treated_alike(tiny, policy):
    run = make(tiny, **recipe(on_bad_numbers=policy))
    one = session(run)
    one.step(), one.save()
    before = masters(one)
    infinite_gradients(one, one.trainer.stages[1].name)
    if policy == "stop":
        with pytest.raises(ValueError, match=r"gradients of step 2 .*\.png at noise level"):
            one.step()
        assert events(run, "rolled_back") == [] and run.log.history().step == 2
    else:
        assert one.step() == 1 and same(masters(one), before)
        assert [s for s, _ in run.losses()] == [1] and run.skipped == (2,)


# -- too little memory


@pytest.mark.parametrize("policy, step", [("go on", 2), ("roll back", 1)])
def test_a_step_cut_short_by_memory_goes_on_or_back(tiny, policy, step):
    run = make(tiny, **recipe(on_out_of_memory=policy))
    one = session(run)
    one.step(), one.save()
    before = masters(one)
    arena, update = one.trainer.stages[1].arena, one.trainer.stages[1].arena.update

    def fail(**kwargs):
        arena.update = update
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    arena.update = fail
    one.trainer.tighten = _tightened(one.trainer)
    assert one.step() == step
    assert (events(run, "rolled_back") != []) == (policy == "roll back")
    assert same(masters(one), before) == (policy == "roll back")
    assert run.skipped == () and not one.trainer.torn
    if policy == "roll back":
        assert events(run, "rolled_back")[0]["why"] == "out of memory"
    assert one.step() == step + 1


def _tightened(trainer: Trainer):
    """On a CPU there is nothing to give up: what ``tighten`` does to the counters, at least."""

    def tighten() -> bool:
        trainer.park()
        if trainer.updated:
            trainer.step, trainer.updated = trainer.step + 1, []
        return True

    return tighten

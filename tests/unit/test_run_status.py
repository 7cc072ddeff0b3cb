"""What a run's history says of it: its state, its losses, and whether its worker is there."""

import contextlib
import json

import pytest
from runs import record, save, walk

from trainer import events
from trainer.cli.control import report
from trainer.config import RecipeConfig
from trainer.history import Steps
from trainer.run import RunDirectory


def test_states_follow_the_table(run):
    walk(run, "preparing", "training", "paused", "training", "finished", "training", "stopped", "preparing", "paused")
    for impossible in ("finished", "created"):
        with pytest.raises(AssertionError, match="cannot go"):
            run.transition(impossible)
    assert all("preparing" in events.TRANSITIONS[s] for s in events.TRANSITIONS if s is not None)
    assert set().union(*events.TRANSITIONS.values()) == {s for s in events.TRANSITIONS if s is not None}


def test_an_error_belongs_to_its_state(run):
    walk(run, "preparing", "training")
    run.transition("failed", error="no")
    assert run.status()["error"] == "no" and run.status()["state"] == "failed"
    walk(run, "training")
    assert run.status()["error"] is None


def test_a_resumed_run_supersedes_what_came_after_its_save_point(run):
    walk(run, "preparing", "training")
    run.append("eval", step=0, loss=9.0)
    record(run, range(1, 8), 1.0)
    run.append("eval", step=7, loss=8.0)
    run.append("resumed", step=4)
    assert run.losses() == [(s, 1.0) for s in (1, 2, 3, 4)]
    assert run.evals() == [(0, 9.0)]
    record(run, range(5, 7), 2.0)
    assert run.losses() == [(s, 1.0) for s in (1, 2, 3, 4)] + [(5, 2.0), (6, 2.0)]
    assert RunDirectory(run.path).losses() == run.losses()
    assert len(run.events()) == 15  # nothing is taken out of the file
    run.append("resumed", step=0)
    assert run.losses() == [] and run.status()["step"] == 0


def test_status_counts(run, holder):
    run.transition("preparing")
    run.transition("training", target=10)
    for step, seconds in enumerate((9.0, 2.0, 2.0, 2.0), 1):
        run.append("step", step=step, loss=1 / step, lr=1e-3, seconds=seconds)
    status = run.status()
    assert {k: status[k] for k in ("run", "state", "step", "target", "loss", "lr", "seconds_per_step", "error")} == {
        "run": "run", "state": "training", "step": 4, "target": 10, "loss": 0.25, "lr": 1e-3, "seconds_per_step": 2.0,
        "error": None}
    assert status["images_per_second"] == RecipeConfig().batch_size / 2
    assert (status["seconds_left"], status["loss_first"], status["save_point_step"]) == (12.0, 1.0, None)
    run.append("target", target=20)
    assert run.status()["seconds_left"] == 32.0
    assert json.loads(json.dumps(status)) == status


def test_a_run_whose_loss_has_risen_says_so_until_that_is_taken_back(run, capsys):
    walk(run, "preparing", "training")
    record(run, range(1, 21), 0.5)
    assert run.status()["loss_risen"] is None
    record(run, range(21, 41), 8.0)
    assert run.status()["loss_risen"] == 16.0
    report(run.status(), False)
    assert "the loss is 16 times what it was at first: lower the learning rate" in capsys.readouterr().out
    run.append("config", changed=["optimizer.lr"])
    assert run.status()["loss_risen"] == 16.0
    run.append("config", changed=["recipe.loss"])
    record(run, range(41, 61), 3.0)
    assert run.status()["loss_risen"] is None, "it is another loss"
    record(run, range(61, 81), 24.0)
    assert run.status()["loss_risen"] == 8.0
    run.append("resumed", step=20)
    assert run.status()["loss_risen"] is None


def test_a_line_of_a_step_that_is_none_takes_nothing_from_the_others():
    steps = Steps()
    for step in ("x", 7):
        with contextlib.suppress(TypeError):
            steps.append({"type": "step", "step": step})
    assert [e["step"] for e in steps] == [7] and steps.column("step") == [7]


@pytest.mark.parametrize("state", events.OPEN_STATES)
def test_without_a_worker_an_open_run_was_interrupted(run, holder, state):
    walk(run, "preparing", *([state] if state != "preparing" else []))
    record(run, range(1, 8), 1.0)
    assert (run.status()["state"], run.status()["resume_step"]) == (state, 7)
    save(run, 5)
    holder.kill()
    holder.wait()
    for reader in (run, RunDirectory(run.path)):
        status = reader.status()
        assert (status["state"], status["step"], status["save_point_step"], status["resume_step"]) == (
            "interrupted", 7, 5, 5)


def test_one_that_only_reads_a_save_point_is_no_worker(run):
    walk(run, "preparing")
    assert run.status()["state"] == "interrupted"
    with run.lock():
        assert run.status()["state"] == "preparing"  # a worker that is about to say where it answers
        walk(run, "training")
        assert run.status()["state"] == "interrupted" and run.status()["worker"] is None


@pytest.mark.parametrize("state", ["created", "finished", "stopped", "failed"])
def test_without_a_worker_a_closed_run_stays_what_it_was(run, state):
    walk(run, *{"created": (), "finished": ("preparing", "finished"), "stopped": ("preparing", "stopped"),
                "failed": ("preparing", "failed")}[state])
    assert run.status()["state"] == state

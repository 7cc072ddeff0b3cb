"""Commands about runs: told to a living worker, or done to the disk where there is none."""

import json
from pathlib import Path

import pytest
from commands import here
from workers import SLOW, make, wait_for, wait_for_state

from trainer.run import RunDirectory

KEEPING = {"recipe": {"batch_size": 3, "save_every_steps": 2, "keep_save_points": 5, "checkpoint_every_steps": 3}}


def good(*args: object) -> str:
    done = here(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*args: object) -> str:
    done = here(*args)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr.strip()


def trained(tiny, serve, until: int, **settings) -> RunDirectory:
    run = make(tiny, **settings)
    _, client = serve(run)
    client.train(until)
    wait_for_state(client, "finished")
    client.stop()
    return run


def test_a_stopped_run_goes_back_and_on(tiny, serve):
    run = trained(tiny, serve, 5, **KEEPING)
    assert "stopped at step 4 of 5" in good("rollback", run.path, "--to", 4)
    assert (run.rollbacks, [p.step for p in run.save_points()]) == (1, [2, 4])
    status = json.loads(good("rollback", run.path, "--json"))
    assert (status["step"], status["rollbacks"]) == (4, 2)  # the newest

    told = refused("rollback", run.path, "--to", 3)  # there is a checkpoint
    assert "--fresh-moments" in told
    assert "goes on from step 3" in good("rollback", run.path, "--to", 3, "--fresh-moments")
    _, client = serve(run)
    assert wait_for_state(client, "paused", "finished")["step"] == 3
    client.train(4)
    wait_for_state(client, "finished")
    client.stop()

    assert "step 0 of" in good("rollback", run.path, "--to", 0)
    assert run.save_points() == [] and run.status()["resume_step"] == 0
    assert "no save point of step 77" in refused("rollback", run.path, "--to", 77)
    for wrong in ("-1", "x", "1.5"):
        assert "--to" in refused("rollback", run.path, "--to", wrong)


def test_a_living_worker_is_told(tiny, serve):
    run = make(tiny, **SLOW)
    _, client = serve(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    assert "training at step" in good("save", run.path)
    saved = run.latest_save_point()
    assert saved is not None and saved.step >= 2
    good("set-lr", run.path, "2e-4")
    wait_for(lambda: client.status()["lr"] == 2e-4)
    wait_for(lambda: client.status()["step"] > saved.step)
    assert "a power cut would cost" in good("status", run.path)
    assert f"paused at step {saved.step} of" in good("rollback", run.path)
    assert client.status()["state"] == "paused"
    for wrong in ("2", "-1", "nan"):
        assert "learning rate" in refused("set-lr", run.path, wrong)
    assert "stopped" in good("stop", run.path)


def test_a_learning_rate_is_set_for_a_run_that_nobody_has_open(tiny, serve):
    run = trained(tiny, serve, 2)
    assert "learning rate set to 5e-05" in good("set-lr", run.path, "5e-5")
    assert run.status()["lr_set"] == 5e-5
    assert "learning rate is 7.0" in refused("set-lr", run.path, "7")
    _, client = serve(run)
    client.train(3)
    assert wait_for_state(client, "finished")["lr"] == 5e-5


def test_what_no_worker_has_open_is_paused_stopped_and_saved_as_it_is(tiny, serve):
    run = trained(tiny, serve, 2)
    before = run.events()
    for what in ("pause", "stop", "save"):
        assert json.loads(good(what, run.path, "--json"))["save_point_step"] == 2
    assert run.events() == before


@pytest.mark.parametrize("what", ["pause", "stop", "save", "rollback", "status"])
def test_what_is_no_run_is_one_line(what, tmp_path: Path):
    assert "is no run directory" in refused(what, tmp_path)

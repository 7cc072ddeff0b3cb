"""What a run measures, keeps and tells on the way: validation, checkpoints, spikes, memory in use, what a power
cut would cost."""

import pytest
import torch
from safetensors.torch import load_file
from sessions import PAIRS, events, recipe, session
from workers import make, wait_for_state

from trainer.loop import Trainer
from trainer.run import RunDirectory


def held_out(run: RunDirectory) -> RunDirectory:
    """The same run with its last two pictures set aside."""
    data = run.dataset
    run.update(run.config, {**data, "samples": data["samples"][:-2], "validation": data["samples"][-2:]})
    return run


def test_validation_at_its_interval_and_at_targets(tiny, serve):
    run = held_out(make(tiny, **recipe(validate_every_steps=2)))
    _, client = serve(run)
    client.train(5)
    wait_for_state(client, "finished")
    told = events(run, "validated")
    assert [e["step"] for e in told] == [0, 2, 4, 5] and len({e["loss"] for e in told}) == 4
    client.stop()
    assert run.status()["validation_loss"] == told[-1]["loss"]
    again = session(run)
    assert again.trainer.validate() == told[-1]["loss"], "noise and levels are fixed"
    again.roll_back(0)
    assert again.trainer.validate() == told[0]["loss"] == run.status()["validation_loss"]


def test_without_pictures_set_aside_nothing_is_validated(tiny):
    run = make(tiny, **recipe(validate_every_steps=1))
    one = session(run)
    one.step(), one.validate_once()
    assert events(run, "validated") == [] and run.status()["validation_loss"] is None


def test_checkpoints_are_made_and_kept_as_the_recipe_says_and_a_failure_costs_nothing_else(tiny, monkeypatch):
    run = make(tiny, **recipe(checkpoint_every_steps=2, keep_checkpoints=2))
    one = session(run)
    for _ in range(7):
        one.step()
    assert [e["step"] for e in events(run, "checkpoint")] == [2, 4, 6]
    assert [c.step for c in run.checkpoints()] == [4, 6]
    assert events(run, "checkpoint")[-1]["file"] == run.checkpoints()[-1].path.name
    weights = load_file(run.checkpoints()[-1].path)
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    monkeypatch.setattr(RunDirectory, "write_checkpoint", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    assert one.step() == 8 and one.step() == 9
    (failed,) = events(run, "checkpoint_failed")
    assert failed["step"] == 8 and "No space" in failed["error"]


def test_save_points_are_kept_as_the_recipe_says(tiny):
    run = make(tiny, **recipe(save_every_steps=1, keep_save_points=3))
    one = session(run)
    for _ in range(5):
        one.step()
    assert [p.step for p in run.save_points()] == [3, 4, 5]


def test_a_loss_that_jumps_is_told_and_the_run_goes_on(tiny, monkeypatch):
    run = make(tiny, **PAIRS)
    one = session(run)
    for _ in range(12):
        one.step()
    losses = [loss for _, loss in run.losses()]
    monkeypatch.setattr(Trainer, "_finite_loss", lambda *_: 50 * max(losses))
    assert one.step() == 13 and one.step() == 14
    (spike,) = events(run, "spike")
    assert spike["step"] == 13 and min(losses) <= spike["usual"] <= max(losses)


def test_what_a_power_cut_would_cost_is_known_to_all(tiny):
    run = make(tiny, **PAIRS)
    one = session(run)
    assert run.status()["unsaved_seconds"] == 0
    for _ in range(3):
        one.step()
    seconds = [e["seconds"] for e in events(run, "step")]
    assert RunDirectory(run.path).status()["unsaved_seconds"] == pytest.approx(sum(seconds), abs=2e-3)
    one.save()
    assert run.status()["unsaved_seconds"] == 0
    one.step()
    assert run.status()["unsaved_seconds"] == pytest.approx(events(run, "step")[-1]["seconds"], abs=2e-3)
    one.drop()
    one.begin()  # as after a crash
    assert run.status()["unsaved_seconds"] == 0


def test_it_saves_every_so_many_minutes_by_the_clock_that_others_see(tiny):
    run = make(tiny, **recipe(save_every_minutes=1))
    one = session(run)
    one.step()
    assert not events(run, "saved")
    run.log.history().save_clock = 60.0
    one.step(), one.step()
    assert [e["step"] for e in events(run, "saved")] == [2]


def test_images_and_epochs_are_counted(tiny):
    run = make(tiny, **PAIRS)
    one = session(run)
    for _ in range(4):
        one.step()
    status = run.status()
    assert status["images_seen"] == 8 and status["epoch"] == pytest.approx(8 / 6, abs=1e-5)
    one.save()
    one.step(), one.roll_back()
    assert run.status()["images_seen"] == 8
    one.step()
    assert run.status()["images_seen"] == 10


def test_memory_in_use_is_told_while_it_trains(tiny, monkeypatch):
    monkeypatch.setattr("trainer.live.session.MEASURED", 0.0)
    run = make(tiny, **PAIRS)
    one = session(run)
    one.step()
    (told,) = events(run, "memory")
    told_now = run.log.history().summary()
    assert told_now["ram_gb"] == told["ram_gb"] > 0 and told["vram_gb"] == 0
    assert told_now["waits_for"] == told["waits"] and run.status()["ram_gb"] is None, "no worker holds it"
    one.transition("paused"), one.transition("training")
    assert run.log.history().summary()["ram_gb"] is None, "to be measured anew"

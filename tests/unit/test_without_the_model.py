"""A run whose model file is gone: its save points hold all that it needs, but for what is told in one line."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from commands import here
from safetensors.torch import load_file
from sessions import recipe
from workers import make, wait_for_state

from trainer.compare import ASK
from trainer.config import ModelConfig


@pytest.fixture
def bereft(tiny, serve):
    """A run at step 2, saved and stopped, whose model file was moved to where the second value says."""
    run = make(tiny, **recipe(save_every_steps=1, keep_save_points=3))
    _, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    client.stop()
    flux = Path(run.config.model.flux)
    return run, Path(shutil.move(flux, flux.with_name("elsewhere.safetensors")))


def test_it_is_trained_looked_at_taken_back_and_exported(bereft, serve, tmp_path):
    run, _ = bereft
    _, client = serve(run)
    client.train(4)
    assert wait_for_state(client, "finished")["step"] == 4
    client.train(4), client.evaluate()
    sizes = run.flux(resumed=True).flux
    velocity = client.predict(torch.zeros(1, 16, 8, 8), torch.ones(1), torch.zeros(1, 6, sizes["context_in_dim"]),
                              torch.zeros(1, sizes["vec_in_dim"]), torch.ones(1))
    assert velocity.isfinite().all() and velocity.abs().sum() > 0
    assert client.roll_back(3) == 3
    client.export(tmp_path / "out.safetensors")
    assert load_file(tmp_path / "out.safetensors")
    with pytest.raises(ValueError, match=r"flux.safetensors is gone; put it back, a LoRA is"):
        client.export(tmp_path / "lora.safetensors", lora_rank=2)
    with pytest.raises(ValueError, match="flux.safetensors is gone"):
        client.roll_back(0)
    assert client.status()["step"] == 3


def test_the_command_line_plans_and_trains_it(bereft):
    run, _ = bereft
    assert here("plan", run.path).returncode == 0
    assert here("train", run.path, "--until", 3).returncode == 0 and run.status()["step"] == 3


def test_without_anything_saved_the_line_says_which_file_is_missing(tiny, serve):
    run = make(tiny)
    Path(run.config.model.flux).unlink()
    told = here("train", run.path, "--until", 1)
    assert told.returncode != 0 and "flux.safetensors does not exist" in told.stderr and "Traceback" not in told.stderr


def test_a_model_that_was_moved_is_known_again_by_its_noted_content(bereft, tiny):
    run, elsewhere = bereft
    moved = dataclasses.replace(run.config, model=ModelConfig(flux=str(elsewhere)))
    assert run.differences(moved) == []
    with open(elsewhere, "r+b") as file:  # another model
        file.seek(-4, 2)
        file.write(b"abcd")
    assert [(d.name, d.grade) for d in run.differences(moved)] == [("model.flux", ASK)]
    missing = dataclasses.replace(run.config, model=ModelConfig(flux=str(elsewhere) + ".not"))
    assert [d.grade for d in run.differences(missing)] == [ASK]
    (run.path / "model.json").unlink()
    assert [d.grade for d in run.differences(moved)] == [ASK]

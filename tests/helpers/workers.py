"""What tests of workers and their clients share."""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer.run import RunDirectory

SLOW = {"shapes": [(16, 16)] * 4, "recipe": {"batch_size": 4}}
"""A run whose step takes long enough to be caught in the middle of training."""


def make(tiny, **settings) -> RunDirectory:
    config, folder, manifest = tiny(**settings)
    return RunDirectory.create(folder, config, manifest)


def wait_for(condition, seconds=120.0, what="it"):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)
    return found


def wait_for_state(client, *states, seconds=240.0):
    def reached():
        status = client.status(wait=0)
        assert status["state"] != "failed" or "failed" in states, status["error"]
        return status if status["state"] in states else None

    return wait_for(reached, seconds, f"one of {states}")


def state_files(point: Path) -> dict[str, torch.Tensor]:
    return {f"{f.name}:{k}": t for f in sorted(point.glob("*.safetensors")) for k, t in load_file(f).items()}

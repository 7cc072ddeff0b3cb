"""When a run that a graph describes is the one there is: settings of every grade, files and folders that were moved,
LoRAs merged into them."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from runs import config_for

from trainer.compare import ASK, MAY_CHANGE, REFUSE, compare
from trainer.config import LoraConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig
from trainer.flux.diffusers_names import diffusers_shapes
from trainer.flux.model import TINY
from trainer.run import RunDirectory
from trainer.weights import entry, write_safetensors


def test_differences_are_graded(folder):
    old = config_for(folder)
    new = dataclasses.replace(
        old, name="other", model=ModelConfig(flux="/elsewhere/flux.safetensors", vae=old.model.vae),
        dataset=dataclasses.replace(old.dataset, resolution=512),
        optimizer=OptimizerConfig(kind="adan", lr=1e-4, betas=(0.98, 0.92, 0.99)),
        memory=MemoryConfig(blocks_to_swap=3), recipe=RecipeConfig(lr_schedule="cosine", schedule_steps=10))
    assert {d.name: d.grade for d in compare(old, new)} == {
        "model.flux": ASK, "dataset.resolution": ASK, "optimizer.kind": ASK, "optimizer.lr": MAY_CHANGE,
        "optimizer.betas": MAY_CHANGE, "memory.blocks_to_swap": MAY_CHANGE, "recipe.lr_schedule": MAY_CHANGE,
        "recipe.schedule_steps": MAY_CHANGE}
    assert "optimizer.lr was 3.5e-06 and is 0.0001" in [str(d) for d in compare(old, new)]
    assert compare(old, dataclasses.replace(old, name="other")) == []


def test_a_moved_model_is_the_same_model_and_another_architecture_is_refused(tiny, tmp_path):
    old, _, _ = tiny(name="a")
    moved = shutil.copy(old.model.flux, tmp_path / "renamed.safetensors")
    other, _, _ = tiny(name="b", params=dataclasses.replace(TINY, depth=2))

    def grades(flux: str) -> list[str]:
        return [d.grade for d in compare(old, dataclasses.replace(old, model=ModelConfig(flux=flux)))]

    assert grades(str(moved)) == []
    assert grades(other.model.flux) == [REFUSE]
    with open(moved, "r+b") as file:  # the same architecture, other weights
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    assert grades(str(moved)) == [ASK]


def with_loras(config: RunConfig, *loras: tuple[Path | str, float]) -> RunConfig:
    named = tuple(LoraConfig(path=str(path), strength=strength) for path, strength in loras)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, loras=named))


def file(path: Path, value: float) -> Path:
    write_safetensors(path, [entry("x.diff", torch.full((3,), value))])
    return path


def test_another_set_of_loras_asks(tiny, tmp_path: Path) -> None:
    old, _, _ = tiny(name="a")
    one, two = file(tmp_path / "one.safetensors", 1.0), file(tmp_path / "two.safetensors", 2.0)
    copy = shutil.copy(one, tmp_path / "copy.safetensors")

    def grades(before: RunConfig, after: RunConfig) -> list[tuple[str, str]]:
        return [(d.name, d.grade) for d in compare(before, after)]

    asks = [("model.loras", ASK)]
    plain, at_one = old, with_loras(old, (one, 1.0))
    assert grades(plain, at_one) == grades(at_one, plain) == asks
    assert grades(at_one, with_loras(old, (one, 0.9))) == asks
    assert grades(at_one, with_loras(old, (two, 1.0))) == asks
    assert grades(at_one, with_loras(old, (one, 1.0), (two, 1.0))) == asks
    assert grades(at_one, with_loras(old, (tmp_path / "gone", 1.0))) == asks
    assert grades(at_one, at_one) == grades(at_one, with_loras(old, (copy, 1.0))) == []
    assert grades(plain, with_loras(old, (one, 0.0))) == [], "what is not added makes no difference"
    assert str(compare(plain, with_loras(old, (one, 0.5)))[0]) == f"model.loras was none and is {str(one)!r} at 0.5"


def test_the_settings_of_a_run_keep_its_loras(tiny, tmp_path: Path) -> None:
    config, folder, dataset = tiny(name="a")
    inside = file(folder / "lora.safetensors", 1.0)
    RunDirectory.create(folder, with_loras(config, (inside, 0.5)), dataset)
    moved = tmp_path / "elsewhere"
    shutil.move(folder, moved)
    assert RunDirectory(moved).config.model.loras == (LoraConfig(path=str(moved / "lora.safetensors"), strength=0.5),)


@pytest.mark.parametrize("depth, grade", [(1, None), (2, REFUSE)])
def test_a_folder_that_was_moved_is_the_same_model(tiny, tmp_path: Path, depth: int, grade: str | None) -> None:
    old, _, _ = tiny(name="a")

    def folder(name: str, depth: int) -> Path:
        sizes = dataclasses.asdict(dataclasses.replace(TINY, depth=depth))
        path = tmp_path / name / "diffusion_pytorch_model.safetensors"
        path.parent.mkdir()
        write_safetensors(path, [entry(n, torch.ones(s)) for n, s in diffusers_shapes(sizes).items()])
        return path.parent

    def on(path: Path) -> RunConfig:
        return dataclasses.replace(old, model=dataclasses.replace(old.model, flux=str(path)))

    first, second = folder("first", 1), folder("second", depth)
    assert [d.grade for d in compare(on(first), on(second))] == ([grade] if grade else [])
    assert compare(on(first), on(first / "diffusion_pytorch_model.safetensors")) == []

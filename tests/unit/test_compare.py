"""When a run that a graph describes is the one there is: files and folders that were moved, LoRAs merged into them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from trainer.compare import ASK, REFUSE, compare
from trainer.config import LoraConfig, RunConfig
from trainer.flux.diffusers_names import diffusers_shapes
from trainer.flux.model import TINY
from trainer.run import RunDirectory
from trainer.weights import entry, write_safetensors


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

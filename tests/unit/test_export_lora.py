"""LoRAs extracted from the difference to the parent."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from exports import apply, distance, left, metadata, write
from safetensors.torch import load_file, save_file
from states import exact

from tests.conftest import write_flux
from trainer.config import LoraConfig
from trainer.export.extract import EXACT_BELOW, is_factored, low_rank
from trainer.flux.model import TINY
from trainer.flux.sizes import shapes_of
from trainer.loop import Trainer
from trainer.run import RunDirectory


def test_a_lora_of_full_rank_is_the_training(trained, tmp_path):
    run, trainer = trained
    done = write(run, tmp_path / "lora.safetensors", trainer, lora_rank=128, dtype="f32")
    parent, wanted = load_file(run.config.model.flux), exact(trainer)
    made = apply(parent, load_file(tmp_path / "lora.safetensors"))
    assert distance(parent, wanted) > 0.1
    assert all(torch.allclose(made[n], wanted[n], rtol=0, atol=1e-6) for n in wanted)
    assert "keeps 100.0% of the change" in done["text"]
    assert metadata(tmp_path / "lora.safetensors")["flux_fft.kept"] == "1.000000"


@pytest.mark.parametrize("saved", [False, True])
def test_what_a_lora_keeps_is_told_and_true(trained, tmp_path, saved):
    run, trainer = trained
    parent, wanted, seen = load_file(run.config.model.flux), exact(trainer), []
    whole = distance(parent, wanted) ** 2
    for rank in (1, 4, 16, 60):
        path = tmp_path / f"{rank}.safetensors"
        done = write(run, path, None if saved else trainer, lora_rank=rank)
        about = metadata(path)
        kept = 1 - distance(apply(parent, load_file(path)), wanted) ** 2 / whole
        assert float(about["flux_fft.kept"]) == pytest.approx(kept, abs=1e-4)
        assert f"keeps {kept:.1%}" in done["text"] and about["modelspec.architecture"] == "flux-1-dev/lora"
        assert about["flux_fft.lora_rank"] == about["ss_network_dim"] == str(rank)
        each = json.loads(about["flux_fft.kept_by_matrix"])
        assert each.keys() == {n.removesuffix(".weight") for n, s in shapes_of(TINY.__dict__).items() if len(s) == 2}
        assert all(0 < share <= 1 for share in each.values())
        seen.append(kept)
    assert seen == sorted(seen) and seen[0] < 0.5 and seen[-1] > 0.9
    assert left(tmp_path) == sorted([f"{r}.safetensors" for r in (1, 4, 16, 60)] + ["run"])


@pytest.mark.parametrize("shape", [(40, 700), (640, 768), (1536, 600)])
def test_factors_are_next_to_the_best_there_are(shape):
    """Against the exact SVD, of a change whose singular values fall slowly: the hard case."""
    g = torch.Generator().manual_seed(0)
    m, n = shape
    left_, right = (torch.linalg.qr(torch.randn(k, min(shape), generator=g))[0] for k in shape)
    change = 1e-3 * left_ * torch.arange(1, min(shape) + 1) ** -0.4 @ right.T
    values = torch.linalg.svdvals(change.double())
    for rank in (4, 32, min(shape)):
        up, down = low_rank(change, rank, "a")
        assert up.shape == (m, rank) and down.shape == (rank, n)
        best = float(values[rank:].square().sum()) ** 0.5
        error = float((change - up @ down).norm())
        assert error <= best * 1.005 + 1e-5 * float(change.norm())
        assert torch.allclose(up.norm(dim=0), down.norm(dim=1), rtol=1e-3), "neither factor is small"
        again = low_rank(change, rank, "a")
        assert torch.equal(again[0], up) and torch.equal(again[1], down)
    assert min(shape) < EXACT_BELOW or not torch.equal(low_rank(change, 4, "b")[0], low_rank(change, 4, "a")[0])


def test_factors_are_only_used_where_they_save_something():
    assert is_factored((3072, 3072), 1535) and not is_factored((3072, 3072), 1536)
    assert not is_factored((3072, 64), 63) and is_factored((3072, 64), 62) and not is_factored((3072,), 1)


def test_a_merged_lora_counts_as_part_of_the_training(trained, tmp_path):
    """Whoever is given the LoRA has the model's file, and nothing else."""
    run, trainer = trained
    save_file({"a": torch.zeros(1)}, tmp_path / "merged.safetensors")
    lora = LoraConfig(path=str(tmp_path / "merged.safetensors"), strength=0.5)
    trainer.config = dataclasses.replace(trainer.config, model=dataclasses.replace(trainer.config.model, loras=(lora,)))
    write(run, tmp_path / "lora.safetensors", trainer, lora_rank=128, dtype="f32")
    made = apply(load_file(run.config.model.flux), load_file(tmp_path / "lora.safetensors"))
    assert distance(made, exact(trainer)) < 1e-4
    origin = json.loads(metadata(tmp_path / "lora.safetensors")["flux_fft.parent"])
    assert origin["loras"][0]["strength"] == 0.5 and len(origin["loras"][0]["sha256"]) == 64
    assert "merged.safetensors" not in json.dumps(metadata(tmp_path / "lora.safetensors"))


def test_a_lora_of_an_untrained_run_or_of_another_parent_is_refused(tiny, trained, tmp_path):
    config, folder, manifest = tiny(name="fresh")
    run = RunDirectory.create(folder, config, manifest)
    fresh = Trainer(config, folder, dataset=manifest)
    with pytest.raises(ValueError, match="there is no LoRA of them: train the run first"):
        write(run, tmp_path / "x.safetensors", fresh, lora_rank=4)
    run, trainer = trained
    run.flux(resumed=False)  # as it is noted when a run begins
    write_flux(Path(run.config.model.flux), seed=1)
    with pytest.raises(ValueError, match="is another Flux than the one that this run began with"):
        write(run, tmp_path / "x.safetensors", trainer, lora_rank=4)
    Path(run.config.model.flux).unlink()
    with pytest.raises(ValueError, match="is gone; put it back"):
        write(run, tmp_path / "x.safetensors", trainer, lora_rank=4)
    assert write(run, tmp_path / "y.safetensors", trainer)["step"] == 2, "a model needs no parent"
    assert not list(tmp_path.glob("*x.safetensors*"))

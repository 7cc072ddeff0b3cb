"""Exported models: what they hold, of which step and which weights, by the command line too."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from exports import apply, distance, left, metadata, raw, write
from safetensors.torch import load_file
from states import exact

from trainer.cli.main import main
from trainer.export import reread
from trainer.export.write import ExportOptions
from trainer.loop import Trainer
from trainer.optim.average import decay_at
from trainer.run import RunDirectory
from trainer.weights import entry, write_safetensors

# -- what they hold


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "fp8"])
def test_the_save_point_gives_the_file_that_the_engine_gives(trained, tmp_path, dtype):
    run, trainer = trained
    out = tmp_path / "out"
    out.mkdir()
    done = write(run, out / "live.safetensors", trainer, dtype=dtype)
    again = write(run, out / "saved.safetensors", dtype=dtype)
    assert done["step"] == again["step"] == 2 and done["bytes"] == (out / "live.safetensors").stat().st_size
    live, saved = (load_file(out / f"{name}.safetensors") for name in ("live", "saved"))
    assert live.keys() == saved.keys()
    assert all(torch.equal(raw(live[n]), raw(saved[n])) for n in live)
    if dtype != "fp8":
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
        assert all(torch.equal(live[n], t.to(kind)) for n, t in exact(trainer).items())
    assert left(out) == ["live.safetensors", "saved.safetensors"]


def test_copies_are_given_in_parts(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", [entry("w", torch.arange(10.0))])
    (copy,) = reread.copies(tmp_path / "a.safetensors", {"w": "other.w"}, chunk=4)
    assert copy.name == "other.w" and [c.tolist() for c in copy.chunks()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# -- which weights


def test_steps_and_averages_that_are_not_there_are_told(trained, tmp_path):
    run, trainer = trained
    with pytest.raises(ValueError, match=r"has kept nothing of step 7: it has 2"):
        write(run, tmp_path / "x.safetensors", trainer, from_step=7)
    assert write(run, tmp_path / "x.safetensors", trainer, from_step=2)["step"] == 2
    for source in (trainer, None):
        with pytest.raises(ValueError, match="average"):
            write(run, tmp_path / "y.safetensors", source, ema=True)
    run.write_checkpoint(3, trainer.entries("bf16"), {})
    with pytest.raises(ValueError, match="the checkpoint of step 3 has no average"):
        write(run, tmp_path / "y.safetensors", trainer, from_step=3, ema=True)
    assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp8"}, {"lora_rank": 4}])
def test_a_checkpoint_on_the_way_gives_what_it_holds(trained, tmp_path, options):
    """Where its save point is gone: the same file but for what bf16 has lost."""
    run, trainer = trained
    write(run, tmp_path / "then.safetensors", trainer, **options)
    run.write_checkpoint(2, trainer.entries("bf16"), {})
    for point in run.save_points():
        shutil.rmtree(point.path)
    trainer.train_step()
    assert write(run, tmp_path / "now.safetensors", trainer, **options)["step"] == 3
    for source in (trainer, None):
        done = write(run, tmp_path / "found.safetensors", source, from_step=2, overwrite=True, **options)
        assert done["step"] == 2
        then, found, now = (load_file(tmp_path / f"{name}.safetensors") for name in ("then", "found", "now"))
        if "lora_rank" in options:
            then, found, now = (apply(load_file(run.config.model.flux), lora) for lora in (then, found, now))
        assert distance(found, then) < distance(now, then) / 3
        assert options != {"dtype": "bf16"} or distance(found, then) == 0


def test_the_average_is_exported_from_memory_and_from_a_save_point(tiny, tmp_path):
    config, folder, manifest = tiny(optimizer={"lr": 3e-3, "weight_precision": "split"}, recipe={"ema_decay": 0.5})
    run = RunDirectory.create(folder, config, manifest)
    trainer = Trainer(config, folder, dataset=manifest)
    averages = exact(trainer)
    for step in (1, 2, 3):
        trainer.train_step()
        decay = decay_at(0.5, step)
        averages = {n: decay * averages[n] + (1 - decay) * t for n, t in exact(trainer).items()}
    run.write_save_point(3, trainer.save)
    for source in (trainer, None):
        done = write(run, tmp_path / "a.safetensors", source, dtype="f32", ema=True, overwrite=True)
        assert "average at step 3" in done["text"]
        found = load_file(tmp_path / "a.safetensors")
        assert distance(found, averages) < distance(found, exact(trainer)) / 20
        assert metadata(tmp_path / "a.safetensors")["flux_fft.weights"] == "average"


# -- options


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "f8"}, "dtype"), ({"lora_rank": -1}, "lora_rank"), ({"lora_rank": 9999}, "lora_rank"),
        ({"from_step": -3}, "from_step"), ({"include": ("everything",)}, "include"),
        ({"lora_rank": 4, "dtype": "fp8"}, "dtype"), ({"lora_rank": 4, "all_in_one": True}, "all_in_one"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        ExportOptions(**options)


def test_the_command_line_has_it_all(trained, tmp_path, capsys):
    run, trainer = trained
    dataset = dataclasses.replace(run.config.dataset, trigger_word="blorp")
    run.update(dataclasses.replace(run.config, dataset=dataset))

    def ask(*words: str) -> str:
        code = main(["export", str(run.path), "--out", str(tmp_path / "a.safetensors"), "--overwrite", *words])
        said = capsys.readouterr()
        assert code == (2 if said.err else 0) and said.err.count("\n") <= 1
        return said.out + said.err

    assert ask("--dtype", "fp8").endswith("fp8, step 2, 1.2 MB\n")
    assert "scaled_fp8" in load_file(tmp_path / "a.safetensors")
    told = json.loads(ask("--lora", "4", "--json", "--include", "trigger"))
    assert told["text"].startswith("LoRA of rank 4, bf16, step 2") and "% of the change" in told["text"]
    assert metadata(tmp_path / "a.safetensors")["modelspec.trigger_phrase"] == "blorp"
    assert "step 2" in ask("--from", "2", "--title", "A title")
    about = metadata(tmp_path / "a.safetensors")
    assert about["modelspec.title"] == "A title" and "blorp" not in json.dumps(about)
    for words, line in ((("--from", "9"), "nothing of step 9"), (("--ema",), "average"),
                        (("--all-in-one",), "clip_l is not chosen"), (("--lora", "4", "--dtype", "fp8"), "a LoRA is")):
        assert line in ask(*words)
    exported = [e for e in run.events() if e["type"] == "exported"]
    assert (exported[0]["file"], exported[0]["folder"]) == ("a.safetensors", str(tmp_path))
    assert left(tmp_path) == ["a.safetensors", "run"]

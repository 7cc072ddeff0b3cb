"""The whole loop without ComfyUI: from random weights to pictures of what the captions say."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from trainer import demo, demo_data
from trainer.flux.variants import inspect_file
from trainer.run import RunDirectory
from trainer.weights import TensorFile

ROOT = Path(__file__).parents[2]


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "trainer", *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True, timeout=1200)  # fmt: skip
    return done


def here(*arguments):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.main(parser.parse_args([str(a) for a in arguments]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    done = command("demo", "--out", out, "--steps", 240, "--json")
    assert done.returncode == 0, done.stderr
    return out, done


def test_it_learns_what_the_captions_say(trained):
    out, done = trained
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    names = ["accuracy", "checkpoint", "loss_first", "loss_last", "run_dir", "samples", "seconds", "steps"]
    assert sorted(result) == names
    assert result["steps"] == 240 and result["run_dir"] == str(out) and result["seconds"] > 0
    assert result["accuracy"] >= 14 / 16
    assert result["loss_last"] < 0.3 * result["loss_first"]
    assert "240/240" in done.stderr and "loss" in done.stderr


def test_the_files_it_leaves(trained):
    out, done = trained
    result = json.loads(done.stdout)
    paths = [Path(p) for p in result["samples"]]
    assert len(paths) == 34 and all(p.parent == out / "samples" for p in paths)
    before, after = paths[:17], paths[17:]
    assert [p.name for p in after[:2]] == ["demo-step-000240_sheet.png", "demo-step-000240_00_red_circle.png"]
    # Measured again from the files alone: the untrained pictures are none of the drawings.
    pictures = [np.stack([np.asarray(Image.open(p)) / 255 for p in group[1:]]) for group in (before, after)]
    shares = [demo.accuracy(p) for p in pictures]
    assert shares[1] == result["accuracy"] and shares[0] <= 6 / 16
    assert Image.open(out / "samples" / "loss.png").size == (1024, 576)
    info = inspect_file(result["checkpoint"])
    assert info.trainable and info.dtype == "f32" and Path(result["checkpoint"]).parent == out / "checkpoints"
    with TensorFile(result["checkpoint"]) as new, TensorFile(out / "demo" / "flux_demo.safetensors") as old:
        assert set(new.tensors) == set(old.tensors)
        assert all(not new.load(n).equal(old.load(n)) for n in new.tensors)
    run = RunDirectory(out)
    assert [e["folder"] for e in run.events_of("exported")] == ["checkpoints"]
    told = [p.name for p in out.rglob("*.json*") if str(out) in p.read_text(encoding="utf-8")]
    assert not told, "a run directory holds no path to itself"
    assert run.status()["state"] == "finished" and run.status()["step"] == 240
    assert [s for s, _ in run.losses()] == list(range(1, 241)) and [s for s, _ in run.evals()] == [0, 240]


def test_steps_are_targets_and_the_run_can_be_trained_on(trained, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(trained[0], moved)
    first = json.loads(trained[1].stdout)
    assert here("--out", moved, "--steps", 100, "--json") == 0
    again = capsys.readouterr()
    result = json.loads(again.out)
    assert "step 240 already" in again.err and result["steps"] == 240 and result["accuracy"] == first["accuracy"]
    assert (result["loss_first"], result["loss_last"]) == (first["loss_first"], first["loss_last"])
    on = command("train", moved, "--until", 243, "--json")
    assert on.returncode == 0 and json.loads(on.stdout)["step"] == 243, on.stderr
    assert here("--out", moved, "--steps", 245) == 0
    assert "accuracy: " in capsys.readouterr().out
    assert [s for s, _ in RunDirectory(moved).losses()] == list(range(1, 246))


def test_errors_are_one_line(tmp_path, trained):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}", encoding="utf-8")
    cases = {
        ("--out", tmp_path / "file"): "is a file",
        ("--out", tmp_path / "other"): "not the demo's",
        ("--out", tmp_path / "new", "--steps", "0"): "--steps is 0",
        ("--out", trained[0], "--seed", "5"): "training seed 0, not 5",
    }
    for arguments, words in cases.items():
        with pytest.raises(ValueError, match=words) as caught:
            here(*arguments)
        assert "\n" not in str(caught.value)
    done = command("demo", "--out", tmp_path / "file", "--json")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert not (tmp_path / "new").exists()


def test_accuracy_counts_shape_and_colour():
    drawn = demo_data.drawings()
    assert demo.accuracy(drawn) == 1
    assert demo.accuracy(np.roll(drawn, 1, axis=0)) == 0  # another colour of the same shape
    assert demo.accuracy(np.roll(drawn, 4, axis=0)) == 0  # another shape of the same colour
    assert demo.accuracy(np.concatenate([drawn[:12], drawn[:4]])) == 12 / 16


def test_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with demo.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

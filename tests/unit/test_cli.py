"""The command line, as its users have it: processes, exit codes, what is on stdout and what on stderr."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from commands import here
from safetensors.torch import load_file

from trainer.client import open_run
from trainer.loop import Trainer
from trainer.run import RunDirectory
from trainer.settings import to_dict

PACK = Path(__file__).resolve().parents[2]
KEYS = {"run", "state", "step", "target", "loss", "lr", "seconds_per_step", "save_point_step", "error"}
SLOW = {"shapes": [(16, 16)] * 4, "recipe": {"batch_size": 4}}


def make(tiny, **settings) -> RunDirectory:
    config, folder, manifest = tiny(**settings)
    return RunDirectory.create(folder, config, manifest)


def command(*args: object, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "trainer", *map(str, args)], cwd=PACK, capture_output=True, text=True,
                          timeout=120, **options)


def good(*args: object) -> str:
    done = (command if args[0] == "train" else here)(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*args: object, **options) -> str:
    """The one line of an error that is the user's."""
    done = command(*args, **options) if options else here(*args)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done
    assert done.stdout == ""
    return done.stderr.strip()


def wait_for(condition, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def begin(*args: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "trainer", *map(str, args)], cwd=PACK, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def test_a_run_is_trained_looked_at_and_exported(tiny, tmp_path):
    run = make(tiny)
    status = json.loads(good("status", run.path, "--json"))
    assert status.keys() >= KEYS and (status["state"], status["step"]) == ("created", 0)

    done = command("train", run.path, "--until", 4, "--save-every", 3, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["run"], status["state"], status["step"], status["save_point_step"]) == ("run", "finished", 4, 4)
    assert [e["step"] for e in run.events() if e["type"] == "saved"] == [3, 4]
    assert "1/4  loss" in done.stderr and "4/4  loss" in done.stderr and "Traceback" not in done.stderr
    assert not run.locked() and not run.address_file.exists()
    assert json.loads(good("status", run.path, "--json")) == status

    again = command("train", run.path, "--until", 4)
    assert again.returncode == 0 and "at step 4 already: nothing to train" in again.stderr
    assert RunDirectory(run.path).events() == run.events()
    assert "run: finished at step 4 of 4" in good("runs", tmp_path)
    assert json.loads(good("runs", tmp_path, "--json")) == [status]
    assert "it is a run itself" in good("runs", run.path)

    out = tmp_path / "out.safetensors"
    done = json.loads(good("export", run.path, "--out", out, "--dtype", "f32", "--title", "T", "--json"))
    assert (done["step"], done["bytes"]) == (4, out.stat().st_size)
    trainer = Trainer(run.config, run.path, dataset=run.dataset)
    trainer.load(run.latest_save_point().path)
    exported = load_file(out)
    assert all(torch.equal(exported[n], p) for n, p in trainer.model.named_parameters())
    with open_run(run.path) as client:  # and the same from a living worker
        alive = tmp_path / "alive.safetensors"
        good("export", run.path, "--out", alive, "--dtype", "f32", "--title", "T")
        client.stop()
    assert {k: v.tolist() for k, v in load_file(alive).items()} == {k: v.tolist() for k, v in exported.items()}

    before = out.read_bytes()
    assert "exists: choose another name" in refused("export", run.path, "--out", out)
    assert "nowhere does not exist" in refused("export", run.path, "--out", tmp_path / "nowhere" / "x.safetensors")
    assert "choose from" in refused("export", run.path, "--out", tmp_path / "x", "--dtype", "f8")
    assert "is a folder" in refused("export", run.path, "--out", tmp_path, "--overwrite")
    assert "does not end in .safetensors" in refused("export", run.path, "--out", tmp_path / "x.ckpt")
    assert out.read_bytes() == before
    good("export", run.path, "--out", out, "--overwrite")
    assert load_file(out)["img_in.weight"].dtype == torch.bfloat16


def test_a_full_disk_at_export_is_one_line_and_leaves_nothing(tiny, tmp_path):
    resource = pytest.importorskip("resource")
    run = make(tiny)
    good("train", run.path, "--until", 1)
    out = tmp_path / "sub" / "out.safetensors"
    out.parent.mkdir()
    out.write_text("old")

    def small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    error = refused("export", run.path, "--out", out, "--dtype", "f32", "--overwrite", preexec_fn=small_disk)
    assert str(out) in error and "GB" in error
    assert os.listdir(out.parent) == ["out.safetensors"] and out.read_text() == "old"
    assert run.status()["state"] == "finished" and not run.locked()


def test_ctrl_c_saves_and_meanwhile_other_commands_are_answered(tiny, tmp_path):
    run = make(tiny, **SLOW)
    training = begin("train", run.path, "--until", 10_000)
    try:
        wait_for(lambda: run.status()["state"] == "training" and run.status()["step"] >= 2)
        assert json.loads(good("status", run.path, "--json"))["state"] == "training"
        good("export", run.path, "--out", tmp_path / "a.safetensors")
        assert "paused at step" in good("pause", run.path)
        at = run.status()["step"]
        assert run.status()["state"] == "paused" and run.save_points() == []

        following = begin("train", run.path, "--until", at + 10_000)  # in the process that has it open
        wait_for(lambda: run.status()["step"] >= at + 2)
        following.send_signal(signal.SIGINT)
        _, said = following.communicate(timeout=300)
        assert following.returncode == 130 and "open in a worker already" in said and "Traceback" not in said
        training.communicate(timeout=300)
        assert training.returncode == 1
        status = run.status()
        assert status["state"] == "stopped" and status["save_point_step"] == status["step"]

        training = begin("train", run.path, "--until", 10_000)
        wait_for(lambda: run.status()["step"] >= status["step"] + 2)
        training.send_signal(signal.SIGINT)
        out, said = training.communicate(timeout=300)
    finally:
        training.kill()
    assert training.returncode == 130 and "stopped at step" in out and "Traceback" not in said
    assert f"resumed at step {status['step']}" in said
    status = run.status()
    assert status["state"] == "stopped" and status["save_point_step"] == status["step"]
    assert "stopped at step" in good("stop", run.path) and "stopped" in good("pause", run.path)


def test_killed_it_is_shown_as_interrupted_and_goes_on(tiny):
    run = make(tiny, **SLOW)
    training = begin("train", run.path, "--until", 10_000, "--save-every", 2)
    wait_for(lambda: run.status()["step"] >= 3)
    training.kill()
    training.communicate()
    status = json.loads(good("status", run.path, "--json"))
    assert status["state"] == "interrupted" and status["save_point_step"] >= 2 and status["error"] is None
    good("train", run.path, "--until", status["step"] + 1)
    assert [s for s, _ in run.losses()] == list(range(1, status["step"] + 2))


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_on_a_terminal_a_bar_is_drawn_over_itself(tiny):
    run = make(tiny)
    master, slave = os.openpty()
    seen = []

    def read():
        try:
            while data := os.read(master, 65536):
                seen.append(data)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    done = subprocess.run([sys.executable, "-m", "trainer", "train", str(run.path), "--until", "3"], cwd=PACK,
                          stdout=subprocess.PIPE, stderr=slave, timeout=120)
    os.close(slave)
    reader.join(10)
    os.close(master)
    text = b"".join(seen).decode()
    assert done.returncode == 0 and "\r[########" in text and "100 %  3/3  loss" in text and "s/step" in text


def test_a_loss_that_is_no_number_is_one_line(tiny):
    run = make(tiny)
    from trainer.data.cache import Cache

    for sample in run.dataset["samples"]:
        Cache(run.path / "cache").write("latents", sample["latent"], torch.full((16, *sample["shape"]), float("nan")))
    done = command("train", run.path, "--until", 4)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "step 1" in done.stderr.splitlines()[-1] and ".png" in done.stderr.splitlines()[-1]
    assert run.status()["state"] == "failed" and run.status()["step"] == 0


def test_a_new_run_from_a_settings_file(tiny, tmp_path):
    old = make(tiny, name="old")
    file = tmp_path / "settings" / "run.json"
    file.parent.mkdir()
    settings = {**to_dict(old.config), "run_dir": "../new", "dataset_manifest": "../old/dataset.json"}
    settings["model"] = {**settings["model"], "flux": "../old/flux.safetensors"}
    file.write_text(json.dumps(settings))
    assert json.loads(good("train", "--config", file, "--until", 2, "--json"))["run"] == "new"
    new = RunDirectory(tmp_path / "new")
    assert new.config == dataclasses.replace(old.config, name="new") and new.losses()[0][0] == 1
    assert Path(new.dataset["cache"]) == old.path / "cache"  # neither inside the new run nor beside it
    trainer = Trainer(old.config, old.path, dataset=old.dataset)
    assert new.losses() == [(r.step, r.loss) for r in (trainer.train_step(), trainer.train_step())]

    settings["optimizer"]["lr"] = 1e-5
    file.write_text(json.dumps(settings))
    done = command("train", "--config", file, "--until", 3)  # the same file goes on with the same run
    assert done.returncode == 0 and "optimizer.lr was 0.001 and is 1e-05" in done.stderr
    assert [e["lr"] for e in new.events() if e["type"] == "step"] == [1e-3] * 2 + [1e-5]

    other = good("train", tmp_path / "third", "--config", old.path / "config.json", "--until", 1)  # a run like another
    assert other.startswith("third: finished") and RunDirectory(tmp_path / "third").losses() == new.losses()[:1]

    settings["dataset"]["resolution"] = 512
    file.write_text(json.dumps(settings))
    assert "begun differently (dataset.resolution was 1024 and is 512)" in refused(
        "train", "--config", file, "--until", 5)
    del settings["dataset_manifest"]
    file.write_text(json.dumps({**settings, "run_dir": "fourth"}))
    assert "dataset.json does not exist: give dataset_manifest" in refused("train", "--config", file, "--until", 5)
    gone = {**settings["model"], "flux": "../old/fluks.safetensors"}
    file.write_text(json.dumps({**settings, "run_dir": "fourth", "dataset_manifest": "../old/dataset.json",
                                "model": gone}))
    assert "fluks.safetensors does not exist: correct its path under model in run.json" in refused(
        "train", "--config", file, "--until", 5)
    file.write_text(json.dumps({**settings, "batch": 5}))
    assert "unknown settings batch" in refused("train", "--config", file, "--until", 5)
    file.write_text("{")
    assert "is no JSON file" in refused("train", "--config", file, "--until", 5)
    assert not (tmp_path / "settings" / "fourth").exists()


def test_errors_are_one_line_and_exit_code_2(tiny, tmp_path, monkeypatch):
    run = make(tiny)
    for args in (["status", tmp_path], ["train", tmp_path, "--until", 3], ["export", tmp_path, "--out", tmp_path / "x"],
                 ["stop", tmp_path], ["pause", tmp_path], ["plan", tmp_path]):
        assert "no run directory" in refused(*args)
    assert "no folder" in refused("runs", tmp_path / "none")
    assert "no save point: train it first" in refused("export", run.path, "--out", tmp_path / "x.safetensors")
    assert "needs a run directory" in refused("train", "--until", 3)
    assert "whole number above 0" in refused("train", run.path, "--until", 0)
    assert "invalid choice" in refused("tarin")
    assert "--until" in refused("train", run.path)
    monkeypatch.setenv("FLUX_FFT_IDLE_MINUTES", "soon")
    assert "FLUX_FFT_IDLE_MINUTES is 'soon'" in refused("worker", run.path)
    good("status", run.path)
    monkeypatch.delenv("FLUX_FFT_IDLE_MINUTES")
    done = command("status", tmp_path)  # and the same from a process
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "no run directory" in done.stderr
    shutil.rmtree(run.path / "cache")
    done = command("train", run.path, "--until", 3)
    assert done.returncode != 0 and "cache" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_system_error_is_one_line(tiny, monkeypatch):
    run = make(tiny)

    def denied(self):
        raise PermissionError(13, "Permission denied", str(run.path / "lock"))

    monkeypatch.setattr(RunDirectory, "status", denied)
    assert str(run.path / "lock") + ": Permission denied" in refused("status", run.path)


def test_a_broken_run_does_not_hide_the_others(tiny, tmp_path):
    make(tiny)
    shutil.copytree(tmp_path / "run", tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{}")
    done = command("runs", tmp_path, "--json")
    assert done.returncode == 0 and [s["run"] for s in json.loads(done.stdout)] == ["run"]
    assert "broken" in done.stderr and done.stderr.count("\n") == 1


def test_started_by_path_it_finds_itself_and_hides_nothing(tiny, tmp_path):
    """As a worker is, by an embedded Python that reads no environment and knows no current folder."""
    run = make(tiny)
    script = PACK / "trainer" / "__main__.py"
    done = subprocess.run([sys.executable, "-I", script, "status", run.path, "--json"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["state"] == "created"
    (tmp_path / "trainer.py").write_text("raise SystemExit('the wrong trainer')")
    done = subprocess.run([sys.executable, script, "status", run.path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_model_files_and_plans(tiny, tmp_path):
    run = make(tiny)
    flux = run.config.model.flux
    assert "it can be trained" in good("inspect", flux)
    assert json.loads(good("inspect", flux, "--json"))["variant"] == "dev"
    (tmp_path / "x.safetensors").write_text("no")
    assert "x.safetensors is a text file" in good("inspect", tmp_path / "x.safetensors"), "it could be named"
    assert json.loads(good("inspect", tmp_path / "x.safetensors", "--json"))["trainable"] is False
    assert "y.safetensors does not exist" in refused("inspect", tmp_path / "y.safetensors")
    plan = json.loads(good("plan", run.path, "--json"))
    assert plan["device"] == "cpu" and plan["ram_gb"] > 0 and "fits" in good("plan", run.path)

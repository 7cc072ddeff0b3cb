"""A run with its engine: what is noted of a step, and how it takes new settings and old weights."""

import dataclasses
import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sessions import infinite_gradients, session
from states import contents
from workers import make, state_files, wait_for_state

from trainer.export.write import ExportOptions, export
from trainer.live.session import Session
from trainer.loop import Trainer
from trainer.run import RunDirectory
from trainer.weights import DiskFull, TensorFile


def test_gradients_that_are_no_numbers_are_noted_and_stop_the_run(tiny, serve):
    run = make(tiny)
    worker, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    infinite_gradients(worker._session, "double_blocks.0")
    client.train(10)
    status = wait_for_state(client, "failed")
    assert status["step"] == 2 and "step 2 " in status["error"] and "double_blocks.0 " in status["error"]
    assert ".png" in status["error"] and "learning rate" in status["error"] and "\n" not in status["error"]
    first, second = [e for e in run.events() if e["type"] == "step"]
    assert "not_finite" not in first and second["not_finite"] == ["double_blocks.0"]
    assert client.save() == 2  # what there is, is whole
    client.train(3)
    assert wait_for_state(client, "finished")["step"] == 3
    assert "not_finite" not in run.events()[-4]


def test_the_device_is_waited_for_once_to_ask_for_every_stage(tiny, monkeypatch):
    one = session(make(tiny))
    asked = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda *_: pytest.fail("a wait for one flag"))
    real = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors: asked.append(len(tensors)) or real(tensors))
    one.trainer.updated = [s.name for s in one.trainer.stages]
    for stage in one.trainer.stages:
        for group in stage.arena.groups:
            group.finite = torch.ones((), dtype=torch.bool)
    assert one.trainer._report().not_finite == () and len(asked) == 1


# -- other settings


def change(run: RunDirectory, part: str, **values) -> None:
    """New settings, and one picture less, where ``part`` is ``dataset``."""
    config, dataset = run.config, run.dataset
    if part == "dataset":
        run.update(config, {**dataset, "samples": dataset["samples"][1:], "fingerprint": "e" * 64})
    else:
        run.update(dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **values)}))


@pytest.mark.parametrize("part, values", [
    ("optimizer", {"lr": 1e-4}),
    ("optimizer", {"betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.5, "cautious": False, "nesterov": False}),
    ("recipe", {"batch_size": 2, "training_seed": 5}),
    ("recipe", {"loss": "huber", "lr_schedule": "cosine", "schedule_steps": 9}),
    ("dataset", {}),
])
def test_settings_that_need_no_new_engine_are_taken_in_place_as_by_loading_anew(tiny, part, values):
    settings = {"optimizer": {"weight_precision": "split"}}
    told: list[dict] = []
    here = session(make(tiny, name="here", **settings), told)
    anew = session(make(tiny, name="anew", **settings))
    for one in (here, anew):
        one.step(), one.step()
        change(one.run, part, **values)
        assert one.described_anew
    engine = here.trainer
    assert here.take_description() and here.trainer is engine and not here.described_anew
    planned = [e for e in told if e["type"] == "planned"]
    assert len(planned) == 1 + ("batch_size" in values)
    anew.save()
    anew.drop()
    anew.use(anew.load())
    for one in (here, anew):
        one.step(), one.step()
    assert here.run.losses() == anew.run.losses()
    assert here.run.log.history().steps[-1]["lr"] == anew.run.log.history().steps[-1]["lr"]
    a, b = contents(here.trainer), contents(anew.trainer)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_an_engine_is_gone_before_the_next_one_is_made(tiny, serve, monkeypatch):
    """By reference counts alone it would stay until the collector happens to run: its parts hold each other."""
    run = make(tiny)
    worker, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    groups = [g for stage in worker._session.trainer.stages for g in stage.arena.groups]
    held = [weakref.ref(t) for g in groups for t in (g.current, *g.storage.values())]
    del groups
    held += [weakref.ref(part) for part in (worker._session.trainer, worker._session.trainer.conveyor)]
    load, left = Session.load, []

    def loaded(self):
        left.append(sum(ref() is not None for ref in held))
        return load(self)

    monkeypatch.setattr(Session, "load", loaded)
    gc.disable()
    try:
        change(run, "memory", blocks_to_swap=1)
        client.train(3)
        wait_for_state(client, "finished")
    finally:
        gc.enable()
    assert left == [0] and len(held) > 10
    change(run, "optimizer", lr=1e-5)
    client.train(4)
    assert wait_for_state(client, "finished")["lr"] == 1e-5 and left == [0]
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4]


def test_data_that_cannot_be_used_change_nothing(tiny):
    one = session(make(tiny))
    one.step()
    run, before = one.run, contents(one.trainer)
    run.update(dataclasses.replace(run.config, recipe=dataclasses.replace(run.config.recipe, batch_size=1)),
               {**run.dataset, "cache": "nowhere"})
    with pytest.raises(ValueError, match="nowhere"):
        one.take_description()
    assert one.described_anew and one.trainer.config.recipe.batch_size == 3
    assert all(torch.equal(t, before[name]) for name, t in contents(one.trainer).items())


# -- weights in and out


def saved_run(tiny, **settings) -> RunDirectory:
    one = session(make(tiny, **settings))
    one.step(), one.step()
    one.save()
    one.transition("stopped")
    return one.run


def test_a_resumed_run_needs_no_model_file(tiny, monkeypatch):
    run = saved_run(tiny, optimizer={"weight_precision": "split"})
    flux = Path(run.config.model.flux)
    assert str(run.path) not in (run.path / "model.json").read_text()
    (run.path / "model.json").rename(run.path / "kept")  # as of a run of an older version: the file says it
    with monkeypatch.context() as patch:
        patch.setattr("trainer.saves.checkpoint.load_weights", lambda *_: pytest.fail("the weights were read"))
        first = Session(run).load()
    assert (run.path / "model.json").read_bytes() == (run.path / "kept").read_bytes()
    flux.unlink()
    one = Session(run)
    one.use(one.load())
    assert one.trainer.step == 2 and one.trainer.info == first.info
    files = state_files(run.latest_save_point().path)
    found = contents(one.trainer)
    assert len(found) == len(files) and all(torch.equal(t, files[key(name)]) for name, t in found.items())
    one.trainer.train_step()
    RunDirectory(run.path).roll_back()
    (run.path / "model.json").unlink()
    with pytest.raises(ValueError, match="flux.safetensors does not exist"):
        Session(run).load()


def key(name: str) -> str:
    """The name in ``state_files`` of one of ``tensors``."""
    stage = next(s for s in ("embed", "double_blocks.0", "single_blocks.0", "final_layer") if name.startswith(s + "."))
    return f"{stage}.safetensors:{name.removeprefix(stage + '.')}"


def test_a_new_run_looks_at_its_model_whatever_was_noted(tiny):
    one = session(make(tiny))
    (one.run.path / "model.json").write_text("{}")
    Path(one.run.config.model.flux).unlink()
    with pytest.raises(ValueError, match="flux.safetensors does not exist"):
        Session(one.run).load()


@pytest.mark.parametrize("precision", ["split", "f32", "stochastic"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_stopped_run_is_exported_from_its_files(tiny, tmp_path, monkeypatch, precision, dtype):
    run = saved_run(tiny, optimizer={"weight_precision": precision})
    one = Session(run)
    one.use(one.load())
    by_engine = export(run, tmp_path / "engine.safetensors", ExportOptions(dtype=dtype), trainer=one.trainer)
    monkeypatch.setattr("trainer.saves.masters.PART", 256)
    monkeypatch.setattr(Trainer, "__init__", lambda *_, **__: pytest.fail("an engine was made"))
    Path(run.config.model.flux).unlink()
    sizes, read = [], TensorFile.read
    monkeypatch.setattr(TensorFile, "read", lambda *a: sizes.append(a[3] - a[2]) or read(*a))
    done = export(run, tmp_path / "files.safetensors", ExportOptions(dtype=dtype, metadata={"x": "y"}))
    assert {**done, "path": ""} == {**by_engine, "path": "", "bytes": done["bytes"]} and max(sizes) == 256
    with TensorFile(tmp_path / "files.safetensors") as a, TensorFile(tmp_path / "engine.safetensors") as b:
        assert a.tensors.keys() == b.tensors.keys()
        # The date is that of the writing.
        assert {**a.header.metadata, "modelspec.date": ""} == {**b.header.metadata, "modelspec.date": "", "x": "y"}
    x, y = (load_file(tmp_path / f"{name}.safetensors") for name in ("files", "engine"))
    assert all(torch.equal(x[n], y[n]) for n in y)


def test_a_save_point_that_does_not_fit_is_refused_before_anything_is_written(tiny, monkeypatch):
    one = session(make(tiny))
    one.step()
    written = []
    monkeypatch.setattr("trainer.saves.checkpoint._write", lambda path, *_: written.append(path))
    needed = sum(t.numel() * t.element_size() for t in contents(one.trainer).values())  # each of its files would fit
    usage = shutil.disk_usage(one.run.path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(DiskFull, match=r"no room for .*state: .* MB are needed and .* MB are free"):
        one.save()
    assert written == [] and list((one.run.path / "state").iterdir()) == []

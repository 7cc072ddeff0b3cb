"""The run directory: made whole or not at all, moved, found, changed, rolled back, deleted."""

import dataclasses
import json
import os
import shutil
import time

import pytest
from runs import MANIFEST, config_for, empty_run, names, python, record, save, walk

from trainer import events, files
from trainer.config import OptimizerConfig, RecipeConfig
from trainer.run import RunDirectory, RunLocked
from trainer.runs import find_runs, identity

# -- making one


def test_settings_come_back_and_move_with_the_directory(run, folder, tmp_path):
    assert run.config == config_for(folder)
    assert run.dataset == MANIFEST
    for file in folder.rglob("*"):
        assert str(folder) not in (file.read_text() if file.is_file() else ""), file
    moved = tmp_path / "elsewhere" / "other"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    found = RunDirectory(moved)
    assert found.name == found.status()["run"] == "other"
    assert found.config.model.flux == str(moved / "flux.safetensors")
    assert found.config.model.vae == "/models/vae.safetensors"
    assert found.config.dataset.folder == str(moved / "pictures")


def test_a_run_is_not_made_twice_and_a_broken_creation_is_made_good(run, folder):
    with pytest.raises(ValueError, match="already holds a run"):
        empty_run(folder)
    (folder / "config.json").unlink()  # as if the first creation had been cut short
    with pytest.raises(ValueError, match="no run directory"):
        RunDirectory(folder)
    again = empty_run(folder)
    assert [e["type"] for e in again.events()] == ["state"]


def test_a_new_run_never_takes_the_weights_of_one_that_lay_there(run, folder):
    old = save(run, 500)
    copy = folder.parent / "old"
    shutil.copytree(folder, copy)
    (folder / "state" / ".part-step-000600-x").mkdir()
    (folder / "config.json").unlink()  # deleted, but not wholly
    again = empty_run(folder)
    assert again.latest_save_point() is None and names(again) == []
    assert RunDirectory(copy).latest_save_point().step == 500  # a copied run is the same run
    shutil.copytree(copy / "state" / old.path.name, old.path)
    assert again.latest_save_point() is None
    assert save(again, 500, "new").path == old.path
    assert again.latest_save_point().step == 500 and (old.path / "a.bin").read_text() == "new"


def test_no_run_is_made_where_a_worker_still_has_one_open(run, folder, holder):
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="still open in a worker"):
        empty_run(folder)


def test_a_creation_cut_short_at_any_file_leaves_no_run_or_a_whole_one(folder, monkeypatch):
    """Each write of the creation is the last one in turn."""

    class Cut(BaseException):
        pass

    left = 0

    def counted(real):
        def write(*args, **options):
            nonlocal left
            if left == 0:
                raise Cut
            left -= 1
            return real(*args, **options)

        return write

    for last in range(10):
        left = last
        with monkeypatch.context() as patch:
            patch.setattr("trainer.files.write_json", counted(files.write_json))
            patch.setattr("trainer.events.EventLog.append", counted(events.EventLog.append))
            try:
                whole = empty_run(folder)
                break
            except Cut:
                pass
        if (folder / "config.json").exists():
            whole = RunDirectory(folder)
            break
    assert last >= 3 and whole.status()["state"] == "created" and len(whole.events()) == 1
    whole.transition("preparing")


def test_another_format_is_refused(run, folder):
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        RunDirectory(folder)


def test_runs_are_found_among_other_folders(tmp_path, caplog):
    for name in ("b", "a"):
        empty_run(tmp_path / name)
    (tmp_path / "cache").mkdir()
    empty_run(tmp_path / "broken")
    (tmp_path / "broken" / "run.json").write_text("{")
    assert [r.name for r in find_runs(tmp_path)] == ["a", "b"]
    with pytest.raises(ValueError, match="no folder"):
        find_runs(tmp_path / "nowhere")


def test_update_says_what_changed(run):
    new = dataclasses.replace(run.config, optimizer=OptimizerConfig(lr=1e-5), name="whatever")
    assert run.update(new) == ["optimizer.lr"]
    assert run.config.optimizer.lr == 1e-5 and run.events()[-1]["changed"] == ["optimizer.lr"]
    assert run.update(run.config, {**MANIFEST, "fingerprint": "g"}) == ["dataset.json"]
    assert run.dataset["fingerprint"] == "g"
    count = len(run.events())
    assert run.update(run.config, run.dataset) == [] and len(run.events()) == count


def test_nothing_here_needs_torch():
    code = ("import sys; import trainer.run, trainer.client, trainer.protocol, trainer.cli, trainer.worker, "
            "trainer.cli.headless; print('torch' in sys.modules)")
    assert python(code).communicate()[0] == "False\n"


# -- identity, roll-back, deletion


def test_identity_changes_with_rollback_and_recreation_and_not_with_training(folder):
    seen = [identity(folder)]
    run = empty_run(folder)
    seen.append(identity(folder))
    walk(run, "preparing", "training")
    record(run, range(1, 10), 1.0)
    save(run, 5, keep=2)
    save(run, 9, keep=2)
    run.update(dataclasses.replace(run.config, recipe=RecipeConfig(batch_size=1)))
    assert identity(folder) == seen[-1]
    assert run.roll_back(5).step == 5
    seen.append(identity(folder))
    status = run.status()
    assert (status["state"], status["step"], status["rollbacks"]) == ("stopped", 5, 1)
    assert names(run) == ["step-000005"] and run.losses() == [(s, 1.0) for s in range(1, 6)]
    with pytest.raises(ValueError, match="no save point of step 9: it has 5"):
        run.roll_back(9)
    run.delete()
    assert not folder.exists()
    empty_run(folder)
    seen.append(identity(folder))
    assert len(set(seen)) == len(seen)


def test_a_run_in_use_is_neither_rolled_back_nor_deleted(run, holder):
    save(run, 5)
    with pytest.raises(RunLocked):
        run.roll_back()
    with pytest.raises(RunLocked):
        run.delete()
    assert run.rollbacks == 0 and run.config


def test_a_run_that_something_holds_open_is_whole_until_it_can_be_deleted(run, monkeypatch):
    save(run, 5)

    def held(source, target):
        raise PermissionError(13, "The process cannot access the file")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.files.replace", lambda source, target, *_: held(source, target)
                        if source == run.path else os.replace(source, target))
        with pytest.raises(ValueError, match="run 'run' could not be deleted .The process cannot access") as caught:
            run.delete()
    assert "\n" not in str(caught.value)
    assert RunDirectory(run.path).config == run.config and [p.step for p in run.save_points()] == [5]
    run.delete()
    assert not run.path.exists() and os.listdir(run.path.parent) == []


def test_what_is_left_of_a_deletion_that_was_cut_short_goes_when_a_run_is_made(folder):
    old, young = (folder.parent / f".part-old-run-{name}" for name in ("1234", "5678"))
    for path in (old, young):
        (path / "state").mkdir(parents=True)
    os.utime(old, (time.time() - 3700,) * 2)
    empty_run(folder)
    assert not old.exists() and young.is_dir(), "another process may be at it"

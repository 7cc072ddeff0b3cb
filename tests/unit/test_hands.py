"""What people do to a run's folder with their hands: delete it, move it, empty a file in it."""

import json
import shutil

import pytest
from workers import make, wait_for, wait_for_state

from trainer.run import RunDirectory


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_worker_whose_folder_is_gone_writes_nothing_where_it_was(tiny, tmp_path, serve, how):
    config, folder, manifest = tiny()
    worker, client = serve(RunDirectory.create(folder, config, manifest))
    client.train(2)
    wait_for_state(client, "finished")
    client.train(100_000)
    wait_for(lambda: client.status()["step"] > 3)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder / "cache", tmp_path / "kept" / "cache")
    shutil.copy(folder / "flux.safetensors", tmp_path / "kept")
    shutil.move(folder, elsewhere)
    if how == "deleted":
        shutil.rmtree(elsewhere)
    if how == "replaced":
        shutil.move(tmp_path / "kept", folder)
        RunDirectory.create(folder, config, manifest)
    wait_for(lambda: worker.quitting)
    assert "deleted or moved" in worker.quitting
    if how != "replaced":
        assert not folder.exists()
        return
    run = RunDirectory(folder)
    assert [e["type"] for e in run.events()] == ["state"] and not run.save_points()
    assert run.status()["state"] == "created"


def test_lost_events_beside_a_whole_save_point(tiny, serve):
    run = make(tiny)
    worker, client = serve(run)
    client.train(3)
    wait_for_state(client, "finished")
    client.stop()
    wait_for(lambda: not run.worker_alive())
    run.log.path.unlink()
    again = RunDirectory(run.path)
    _, client = serve(again)
    client.train(5)
    assert wait_for_state(client, "finished")["step"] == 5
    assert [step for step, _ in again.losses()] == [4, 5]


def test_a_step_without_its_seconds(tiny):
    run = make(tiny)
    run.append("step", step=1, loss=0.5, lr=1e-3)
    assert run.status()["step"] == 1 and run.status()["seconds_per_step"] is None


@pytest.mark.parametrize("name, text", [("dataset.json", "{}"), ("dataset.json", '{"samples": []}'), ("run.json", "{}"),
                                        ("config.json", "{"), ("config.json", "[]")])  # fmt: skip
def test_a_damaged_file_is_one_line_that_names_it(tiny, name, text):
    run = make(tiny)
    (run.path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=name) as caught:
        _ = (run.uid, run.config, run.dataset)
    assert "\n" not in str(caught.value)


def test_numbers_in_events_stay_json(tiny):
    run = make(tiny)
    run.append("step", step=1, loss=float("nan"), lr=1e-3, seconds=0.1)
    assert all(json.loads(line) for line in run.log.path.read_text(encoding="utf-8").splitlines())

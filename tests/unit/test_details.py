"""What the sidebar shows of a run: settings, save points, the stored graph, preview settings, the log, thumbnails."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.test_follow import MANIFEST, _load, _train
from trainer.config import DatasetConfig, ModelConfig, RunConfig
from trainer.run import RunDirectory

details = _load("details")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = RunConfig(name="r", model=ModelConfig(flux="f.safetensors"),
                       dataset=DatasetConfig(folder="d", resolution=520))
    return RunDirectory.create(tmp_path / "r", config, MANIFEST)


def _graph(run: RunDirectory, **settings: object) -> None:
    prompt = {"4": {"class_type": "FluxFFTPreviewSettings", "inputs": settings}}
    (run.path / "graph.json").write_text(json.dumps({"prompt": prompt, "workflow": None, "node_id": "7"}))


def _five_bytes(folder: Path) -> None:
    (folder / "a").write_bytes(b"12345")


def test_a_new_run_has_settings_and_little_else(run: RunDirectory) -> None:
    found = details.details(run)
    assert found["settings"]["dataset"]["resolution"] == 520 and found["pictures"] == 1
    assert (found["save_points"], found["checkpoints"], found["exports"]) == ([], [], [])
    assert not found["graph"] and not found["log"] and found["bytes"] > 0
    json.dumps(found, allow_nan=False)


def test_save_points_checkpoints_and_exports_are_listed_newest_first(run: RunDirectory) -> None:
    for step in (10, 20):
        run.write_save_point(step, _five_bytes, keep=5)
        (run.path / "checkpoints" / f"r-step-{step:06d}.safetensors").write_bytes(b"123")
    run.append("exported", step=20, file="out.safetensors", dtype="bf16")
    found = details.details(run)
    assert [p["step"] for p in found["save_points"]] == [20, 10]
    assert [p["bytes"] for p in found["checkpoints"]] == [3, 3] and "000020" in found["checkpoints"][0]["file"]
    assert found["exports"][0]["file"] == "out.safetensors" and found["exports"][0]["step"] == 20


def test_the_stored_graph(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="keeps no graph"):
        details.stored_graph(run)
    _graph(run, width=64)
    assert details.stored_graph(run)["prompt"]["4"]["inputs"] == {"width": 64}
    for damaged in ("{}", '{"prompt": 3}', "{"):
        (run.path / "graph.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"graph\.json"):
            details.stored_graph(run)


def test_one_more_picture_is_made_as_the_others_were(run: RunDirectory) -> None:
    assert details.previews(run) == {"width": 512, "height": 512, "sampler_name": "euler", "scheduler": "simple",
                                     "sampling_steps": 20, "guidance": 3.5, "cfg": 1.0, "preview_seed": 0}
    about = {"step": 5, "index": 0, "prompt": "p", "width": 96, "height": 64, "sampler": "heun", "guidance": 2.0}
    (run.path / "samples" / "step-000005_00_a.png").write_bytes(b"x")
    (run.path / "samples" / "step-000005_00_a.json").write_text(json.dumps(about))
    found = details.previews(run)
    assert (found["width"], found["height"], found["sampler_name"], found["cfg"]) == (96, 64, "heun", 1.0)
    _graph(run, prompts="a\nb", width=128, height=["9", 0], sampling_steps=4)
    found = details.previews(run)
    assert (found["width"], found["height"], found["sampling_steps"]) == (128, 512, 4), "a link is no value"
    assert "prompts" not in found


def test_the_first_prompt_is_the_graphs_else_that_of_the_newest_pictures(run: RunDirectory) -> None:
    assert details.first_prompt(run) == ""
    for step, index, prompt in ((5, 0, "old"), (7, 1, "second"), (7, 0, "newest")):
        (run.path / "samples" / f"{step}_{index}.png").write_bytes(b"x")
        (run.path / "samples" / f"{step}_{index}.json").write_text(
            json.dumps({"step": step, "index": index, "prompt": prompt}))
    assert details.first_prompt(run) == "newest"
    _graph(run, prompts="\n  a red circle \nb")
    assert details.first_prompt(run) == "a red circle"
    for other in (["9", 0], "", None):
        _graph(run, prompts=other)
        assert details.first_prompt(run) == "newest", "a link is no text"


def test_what_is_asked_for_is_read_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    for name in ("read_json", "samples", "_bytes"):
        real = getattr(details, name)
        monkeypatch.setattr(details, name, lambda *args, name=name, real=real: (read.append(name), real(*args))[1])
    _graph(run, prompts="a", width=64)
    details.details(run)
    assert sorted(read) == ["_bytes", "read_json"], "the pictures are not asked where the graph says it"
    read.clear()
    assert details.first_prompt(run) == "a" and read == ["read_json"]
    (run.path / "graph.json").unlink()
    details.details(run)
    assert sorted(read) == ["_bytes", "read_json", "samples"]


def test_an_export_into_the_run_is_noted_without_the_runs_own_path(run: RunDirectory, tmp_path: Path) -> None:
    reader = _load("follow").Follower(run.path)
    reader.begin()
    for folder in (run.path / "checkpoints", tmp_path):
        run.note_export({"path": str(folder / "x.safetensors"), "step": 3, "dtype": "bf16", "bytes": 1, "text": ""})
    assert str(run.path) not in run.log.path.read_text(encoding="utf-8")
    told = [e["folder"] for e in run.events_of("exported")]
    assert told == ["checkpoints", str(tmp_path)]
    whole = [(str(run.path / "checkpoints"), "x.safetensors"), (str(tmp_path), "x.safetensors")]
    assert [(e["folder"], e["file"]) for e in details.details(run)["exports"]] == whole
    assert [(e["folder"], e["file"]) for e in reader.news()["happened"]] == whole


def test_the_log_is_given_from_a_whole_line_on(run: RunDirectory) -> None:
    with pytest.raises(FileNotFoundError):
        details.log_tail(run)
    run.log_file.write_bytes(b"short \xff\n")
    assert details.log_tail(run)["text"] == "short \ufffd\n"
    run.log_file.write_text("".join(f"line {i}\n" for i in range(20_000)))
    text = details.log_tail(run)["text"]
    assert len(text) <= details.LOG_BYTES and text.startswith("line ") and text.endswith("line 19999\n")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "I;16"])
def test_small_pictures(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    Image.new(mode, (600, 300)).save(path)
    small = Image.open(io.BytesIO(details.small_picture(path, 200)))
    assert small.format == "JPEG" and small.size == (256, 128)
    path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"a\.png"):
        details.small_picture(path, 128)


def test_a_snapshot_has_rates_and_validation_of_the_present_only(run: RunDirectory) -> None:
    follow = _load("follow")
    reader = follow.Follower(run.path)
    reader.begin()
    _train(run, 1, 4)
    run.append("validated", step=4, loss=0.5)
    news = reader.news()
    assert news["validation"] == [[4, 0.5]] and [b[5] for b in news["losses"]] == [1e-6] * 4
    assert news["happened"] == [] and not news["sampled"]
    run.append("saved", step=4, seconds=1.5)
    run.append("sample", step=4, file="samples/a.png", prompt="p", index=0)
    run.append("save_failed", step=4, error="full")
    news = reader.news()
    assert [e["type"] for e in news["happened"]] == ["saved", "save_failed"] and news["sampled"]
    run.append("resumed", step=2)
    run.append("validated", step=2, loss=0.75)
    snapshot = reader.snapshot()
    assert [b[0] for b in snapshot["losses"]] == [1, 2] and snapshot["validation"] == [[2, 0.75]]


def test_a_disk_that_is_low_is_told_and_a_roomy_one_is_not(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = _load("follow")
    free = [3e9]
    monkeypatch.setattr(follow.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free[0]}))
    monkeypatch.setattr(follow, "_DISK_SECONDS", 0.0)
    reader = follow.Follower(run.path)
    reader.begin()
    before = reader.pulse()
    assert reader.news()["disk_low"] is None
    free[0] = 1e9
    assert reader.pulse() != before and reader.news()["disk_low"] == 1e9


def test_the_list_names_a_thumbnail(run: RunDirectory) -> None:
    follow = _load("follow")
    assert follow.newest_sample(run.path) is None
    for name in ("step-000005_00_a.png", "step-000010_01_b.png", "step-000010_00_b.png", "step-000010_00_b.json"):
        (run.path / "samples" / name).write_bytes(b"x")
    assert follow.newest_sample(run.path) == "step-000010_00_b.png"
    assert follow.Library().statuses(run.path.parent)[0]["thumbnail"] == "step-000010_00_b.png"


def test_the_settings_that_are_told_hold_every_field(run: RunDirectory) -> None:
    told = details.details(run)["settings"]
    assert set(told) == {field.name for field in dataclasses.fields(RunConfig)}

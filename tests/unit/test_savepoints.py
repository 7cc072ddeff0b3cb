"""Save points with the engine: what is written of each file, what is noticed when it is read, and what happens then."""

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from states import SPLIT, contents, emptied, engine, same
from workers import make

from trainer import files
from trainer.cli.main import main
from trainer.live.session import Session
from trainer.run import RunDirectory
from trainer.saves import checkpoint, savepoints
from trainer.saves.savepoints import Source
from trainer.weights import DiskFull


@pytest.fixture
def saved(tiny):
    """A run with save points of steps 1 and 2; and what its engine was then."""
    run = make(tiny, **SPLIT)
    trainer, states = engine(run), {}
    for state in ("preparing", "training"):
        run.transition(state)
    with run.lock():
        for step in (1, 2):
            trainer.train_step()
            states[step] = contents(trainer)
            run.append("step", step=step, loss=1.0, lr=1.0, seconds=1.0)
            run.write_save_point(step, trainer.save, keep=2)
    run.flux(resumed=False)
    return run, states


# -- what is written


def test_the_manifest_has_the_size_and_hash_of_every_file(saved):
    run, _ = saved
    for point in run.save_points():
        listed = json.loads((point.path / "save.json").read_text())
        there = {f.name for f in point.path.iterdir()} - {"save.json"}
        assert set(listed["files"]) == set(listed["sha256"]) == there and "trainer.json" in there and len(there) == 5
        for name in there:
            data = (point.path / name).read_bytes()
            assert listed["files"][name] == len(data)
            assert listed["sha256"][name] == hashlib.sha256(data).hexdigest() == point.sha256[name]
        assert savepoints.verify(point.path) == []


def test_nothing_is_read_again_to_be_hashed(saved, monkeypatch):
    run, states = saved
    trainer = emptied(run)
    trainer.load(run.save_points()[0])
    monkeypatch.setattr(files, "sha256", lambda path: pytest.fail(f"{path} was read again"))
    run.write_save_point(3, trainer.save)
    assert set(run.latest_save_point().sha256) == set(json.loads(
        (run.latest_save_point().path / "save.json").read_text())["files"])


def test_what_another_writes_is_hashed_too(tmp_path):
    def write(folder: Path) -> None:
        (folder / "b").mkdir()
        (folder / "b" / "c.bin").write_bytes(b"abc")

    point = savepoints.write_save_point(tmp_path, "u", 1, write)
    assert point.sha256 == {"b/c.bin": hashlib.sha256(b"abc").hexdigest()} and not savepoints.verify(point.path)


def test_a_file_that_cannot_be_written_stops_the_others(saved, monkeypatch):
    run, _ = saved
    trainer, before = emptied(run), run.save_points()
    real, calls = checkpoint._write, []

    def write(path: Path, parts) -> str:
        calls.append(path.name)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return real(path, parts)

    monkeypatch.setattr(checkpoint, "_write", write)
    monkeypatch.setattr(checkpoint, "HANDS", 1)
    with pytest.raises(files.WriteFailed, match="step 3 could not be written .*Input/output error"):
        run.write_save_point(3, trainer.save)
    assert len(calls) <= 2 and run.save_points() == before
    assert sorted(os.listdir(run.path / "state")) == ["step-000001", "step-000002"]
    assert not [t for t in threading.enumerate() if t.name.startswith("save point")]


def test_room_is_made_by_those_that_would_go_anyway_but_not_by_the_newest(saved, monkeypatch):
    run, _ = saved
    trainer, usage = emptied(run), shutil.disk_usage(run.path)
    needed = 0

    def free(_: object) -> object:
        there = sum(p.path.exists() for p in points)
        return usage._replace(free=needed - 1 if there > 1 else needed)

    points = run.save_points()
    needed = sum(f.stat().st_size for f in points[0].path.glob("*.safetensors"))
    monkeypatch.setattr("shutil.disk_usage", free)
    with pytest.raises(DiskFull):  # three are wanted: none of the two may go
        run.write_save_point(3, trainer.save, keep=3)
    assert run.save_points() == points
    run.write_save_point(3, trainer.save, keep=2)
    assert [p.step for p in run.save_points()] == [2, 3]
    needed = 0
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(DiskFull, match="no room for .*state"):  # the newest stays, whatever is asked
        run.write_save_point(4, trainer.save, keep=1)
    assert [p.step for p in run.save_points()] == [3]


def test_the_room_that_is_asked_for_is_exact(saved, monkeypatch):
    run, _ = saved
    trainer, usage = emptied(run), shutil.disk_usage(run.path)
    asked = []
    monkeypatch.setattr("trainer.saves.checkpoint.check_space", lambda path, needed: asked.append(needed))
    point = run.write_save_point(3, trainer.save)
    assert asked == [sum(f.stat().st_size for f in point.path.glob("*.safetensors"))] and asked[0] < usage.total


# -- what is noticed


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit of the data": lambda p: flip(p / "single_blocks.0.safetensors", -1),
    "a bit of the header": lambda p: flip(p / "double_blocks.0.safetensors", 60),
    "the length of the header": lambda p: flip(p / "double_blocks.0.safetensors", 3),
    "a name in the header": lambda p: _other_text(p / "embed.safetensors", b"exp_avg_sq", b"exp_avg_sp"),
    "a brace in the layout": lambda p: _other_text(p / "embed.safetensors", b'[[', b'[{'),
    "a counter": lambda p: _other_text(p / "trainer.json", b'"step": 2', b'"step": 3'),
    "no JSON": lambda p: flip(p / "trainer.json", 0),
    "a file that is gone": lambda p: (p / "embed.safetensors").unlink(),
    "a file that was cut": lambda p: os.truncate(p / "embed.safetensors", 1000),
    "an empty list": lambda p: (p / "save.json").write_text("{}"),
    "no list": lambda p: (p / "save.json").unlink(),
}  # fmt: skip


def _other_text(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_one_falls_back_to_the_one_before(saved, damage, caplog):
    run, states = saved
    DAMAGES[damage](run.path / "state" / "step-000002")
    trainer = emptied(run)
    with run.lock():
        source = run.resume(trainer.load)
        assert source.step == trainer.step == 1 and same(contents(trainer), states[1])
        told = [e for e in run.events() if e["type"] == "damaged"]
        assert len(told) == 1 and told[0]["step"] == 2 and "step-000002" in told[0]["error"]
        assert "goes on from what was saved before" in caplog.text
        assert run.status()["resume_step"] == run.log.history().step == 1 or not damage.startswith(("a bit", "the"))
        left = sorted(os.listdir(run.path / "state"))
        assert left[0] == "step-000001" and left[1].endswith(".damaged")
        assert run.resume(emptied(run).load).step == 1  # and it is not noticed twice
        assert len([e for e in run.events() if e["type"] == "damaged"]) == 1
        trainer.train_step()
        run.write_save_point(2, trainer.save, keep=2)
    assert sorted(os.listdir(run.path / "state")) == ["step-000001", "step-000002"]
    assert not savepoints.verify(run.latest_save_point().path) and same(contents(trainer), states[2])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_that_is_the_only_one_is_refused_in_one_line(saved, damage):
    run, _ = saved
    shutil.rmtree(run.path / "state" / "step-000001")
    DAMAGES[damage](run.path / "state" / "step-000002")
    before = sorted(os.listdir(run.path / "state"))
    with run.lock(), pytest.raises(ValueError, match="step-000002.*has no other save point.*rollback --to 0") as caught:
        run.resume(emptied(run).load)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(run.path / "state")) == before == ["step-000002"]  # it may be mended
    with pytest.raises(ValueError, match="only damaged save points|is not as it was written"):
        run.roll_back()
    assert sorted(os.listdir(run.path / "state")) == before
    assert run.roll_back(0) is None and run.save_points() == [] and run.status()["resume_step"] == 0


def test_a_damaged_one_before_the_newest_is_left_alone(saved):
    run, _ = saved
    (run.save_points()[0].path / "trainer.json").unlink()
    with run.lock():
        assert run.resume(lambda source: None).step == 2
    assert [e for e in run.events() if e["type"] in ("damaged", "resumed")] == []


def test_a_disk_that_cannot_be_read_is_damage(saved, monkeypatch):
    run, states = saved
    trainer, real = emptied(run), checkpoint.TensorFile.read_all_

    def fail(self, targets):
        if "step-000002" in str(self.path):
            raise OSError(5, "Input/output error")
        return real(self, targets)

    monkeypatch.setattr(checkpoint.TensorFile, "read_all_", fail)
    with run.lock():
        assert run.resume(trainer.load).step == 1 and same(contents(trainer), states[1])


def test_a_session_goes_on_from_the_one_before_and_says_so(saved):
    run, states = saved
    DAMAGES["a bit of the data"](run.path / "state" / "step-000002")
    one = Session(run)
    with run.lock():
        one.begin()
        one.use(one.load())
    assert one.trainer.step == 1 and same(contents(one.trainer), states[1])
    assert run.losses() == [(1, 1.0)]


def test_a_disk_that_fills_up_costs_no_training_and_the_user_is_told(saved, monkeypatch):
    run, _ = saved
    one, told = Session(run, save_every=1, watch=lambda event: told.append(event)), []
    full = [True]

    def failpoint(deed: str, path: Path) -> None:
        if full[0] and deed == "write" and path.suffix == ".safetensors":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "failpoint", failpoint)
    with run.lock():
        one.begin()
        one.use(one.load())
        one.transition("training", target=10)
        before = [savepoints.verify(p.path) for p in run.save_points()]
        assert one.step() == 3 and one.step() == 4
        failed = [e for e in told if e["type"] == "save_failed"]
        assert [e["step"] for e in failed] == [3, 4] and "free some space" in failed[0]["error"]
        assert [p.step for p in run.save_points()] == [2] and before == [[], []] and run.status()["step"] == 4
        assert sorted(os.listdir(run.path / "state")) == ["step-000002"]
        full[0] = False
        assert one.step() == 5
    assert [p.step for p in run.save_points()] == [5] and told[-1]["type"] == "saved"


def test_one_that_does_not_fit_is_no_damage(saved, tiny):
    run, _ = saved
    other = make(tiny, name="other", optimizer={"weight_precision": "split", "state_format": "f24"})
    with pytest.raises(ValueError, match="another optimizer, state format"):
        emptied(other).load(run.latest_save_point())
    with run.lock(), pytest.raises(ValueError, match="does not fit this run"):
        run.resume(emptied(other).load)
    assert len(run.save_points()) == 2


def test_one_of_an_older_version_has_no_hashes_and_is_taken(saved):
    run, states = saved
    path = run.latest_save_point().path / "save.json"
    made = json.loads(path.read_text())
    del made["sha256"]
    path.write_text(json.dumps(made))
    trainer = emptied(run)
    trainer.load(run.latest_save_point())
    assert same(contents(trainer), states[2])


def test_verify_says_what_is_whole_and_what_is_not(saved, capsys):
    run, _ = saved
    trainer = engine(run)
    run.write_checkpoint(2, trainer.entries("bf16"), {})
    assert main(["verify", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "checkpoints/run-step-000002.safetensors: whole", "state/step-000001: whole", "state/step-000002: whole"]
    DAMAGES["a bit of the data"](run.path / "state" / "step-000001")
    os.truncate(run.path / "checkpoints" / "run-step-000002.safetensors", 100_000)
    (run.path / "state" / "step-000002" / "trainer.json").unlink()
    assert main(["verify", str(run.path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["saved"]
    assert [(one["file"], len(one["problems"])) for one in found] == [
        ("checkpoints/run-step-000002.safetensors", 1), ("state/step-000001", 1), ("state/step-000002", 1)]
    assert "single_blocks.0.safetensors is not as it was written" in found[1]["problems"][0]
    assert "trainer.json is gone" in found[2]["problems"][0]


# -- averages


def test_an_average_resumes_bit_for_bit_and_may_come_and_go(tiny):
    def run_of(name: str, decay: float) -> RunDirectory:
        return make(tiny, name=name, recipe={"ema_decay": decay}, **SPLIT)

    run, plain = run_of("with", 0.5), run_of("without", 0.0)
    straight, other = engine(run), engine(plain)
    for trainer in (straight, other):
        trainer.train_step(), trainer.train_step()
    for one, trainer in ((run, straight), (plain, other)):
        one.write_save_point(2, trainer.save)
    again = emptied(run)
    again.load(run.latest_save_point())
    assert any(".ema" in name for name in contents(again)) and same(contents(again), contents(straight))
    for trainer in (straight, again):
        trainer.train_step(), trainer.train_step()
    assert same(contents(again), contents(straight))
    begun, left = emptied(run), emptied(plain)
    begun.load(plain.latest_save_point())
    left.load(run.latest_save_point())
    assert same(contents(left), contents(other))
    assert all(not t.any() for name, t in contents(begun).items() if ".ema" in name)  # the weights themselves
    assert {n for n in contents(begun) if ".ema" not in n} == set(contents(other))


# -- Windows


def test_what_a_virus_scanner_holds_is_tried_again(tmp_path, monkeypatch):
    held, slept, real = [3], [], os.replace

    def replace(source, target):
        if held[0]:
            held[0] -= 1
            raise PermissionError(13, "Access is denied")
        real(source, target)

    def write(folder: Path) -> None:
        (folder / "a").write_text("x")

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr("os.replace", replace)
    monkeypatch.setattr("time.sleep", slept.append)
    point = savepoints.write_save_point(tmp_path / "state", "u", 1, write)
    assert point.path.is_dir() and held == [0] and len(slept) == 3
    held[0] = 1
    monkeypatch.setattr(files, "WINDOWS", False)
    with pytest.raises(files.WriteFailed, match="Access is denied"):
        savepoints.write_save_point(tmp_path / "state", "u", 2, write)
    assert [p.step for p in savepoints.save_points(tmp_path / "state", "u")] == [1]


def test_only_closed_files_get_their_name(saved, monkeypatch):
    """Windows lets nobody rename an open file, or a folder with one in it."""
    run, _ = saved
    trainer, real = emptied(run), os.replace

    def replace(source, target):
        folder = os.path.realpath(source)
        opened = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        assert not [f for f in opened if f == folder or f.startswith(folder + os.sep)], (source, opened)
        real(source, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no list of open files here")
    monkeypatch.setattr("os.replace", replace)
    run.write_save_point(3, trainer.save)
    run.write_checkpoint(3, trainer.entries("bf16"), {})
    run.update(run.config, {**run.dataset, "fingerprint": "e" * 64})


def test_a_source_says_what_it_is(tmp_path):
    assert Source(1, tmp_path) == Source(1, tmp_path, sha256={"a": "b"}) != Source(1, tmp_path, fresh=True)

"""What the panel's server side makes of a run directory: bins, snapshots, news, pictures, and what is sent when."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import random
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import DatasetConfig, ModelConfig, RecipeConfig, RunConfig
from trainer.run import RunDirectory
from trainer.saves import underway

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = {"image": "a.png", "latent": "a", "shape": [8, 8], "caption": "a"}
MANIFEST = {"format": 1, "cache": "cache", "samples": [SAMPLE], "empty_caption": "", "fingerprint": "f"}


def _load(name: str) -> types.ModuleType:
    """A module of ``nodes/`` without the package's ``__init__``, which needs ComfyUI."""
    for package, path in (("flux_fft_pack", ROOT), ("flux_fft_pack.nodes", ROOT / "nodes")):
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(path)]
            sys.modules[package] = module
    return importlib.import_module(f"flux_fft_pack.nodes.{name}")


follow = _load("follow")
pusher = _load("pusher")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config = RunConfig(name="r", model=ModelConfig(flux="f.safetensors"), dataset=DatasetConfig(folder="d"))
    return RunDirectory.create(tmp_path / "r", config, MANIFEST)


def _train(run: RunDirectory, first: int, last: int) -> None:
    for step in range(first, last + 1):
        run.append("step", step=step, loss=1.0 / step, lr=1e-6, seconds=0.5)


def _replay(snapshot: dict, *news: dict) -> list[tuple[float, float]]:
    """What a reader ends up with: the rule of web/store.mjs."""
    known, points = snapshot["n"], [(b[0], b[1]) for b in snapshot["losses"]]
    for one in news:
        assert one["since"] <= known and not one["reset"]
        points += [(b[0], b[1]) for b in one["losses"] if not points or b[0] > points[-1][0]]
        known = one["n"]
    return points


@given(st.lists(st.floats(-10, 10), max_size=400), st.integers(1, 50))
def test_bins_keep_every_step_the_mean_and_the_extremes(losses: list[float], most: int) -> None:
    points = list(enumerate(losses, start=1))
    merged = follow.bins(points, most)
    assert len(merged) <= most
    assert sum(b[4] for b in merged) == len(points)
    if points:
        assert merged[-1][0] == points[-1][0]
        assert sum(b[1] * b[4] for b in merged) == pytest.approx(sum(losses), abs=1e-9)
        assert min(b[2] for b in merged) == min(losses)
        assert max(b[3] for b in merged) == max(losses)


def test_snapshot_and_news_together_give_the_curve(run: RunDirectory) -> None:
    _train(run, 1, 5)
    reader = follow.Follower(run.path)
    reader.begin()
    _train(run, 6, 7)
    snapshot = follow.Follower(run.path).snapshot()
    first = reader.news()
    _train(run, 8, 9)
    second = reader.news()
    assert [b[0] for b in first["losses"]] == [6, 7] and [b[0] for b in second["losses"]] == [8, 9]
    assert second["since"] == first["n"]
    assert _replay(snapshot, first, second) == run.losses() and second["step"] == 9


def test_going_back_asks_the_reader_to_begin_anew(run: RunDirectory) -> None:
    reader = follow.Follower(run.path)
    reader.begin()
    _train(run, 1, 6)
    assert not reader.news()["reset"]
    run.append("resumed", step=4)
    _train(run, 5, 5)
    assert reader.news()["reset"]
    assert [b[0] for b in reader.snapshot()["losses"]] == [1, 2, 3, 4, 5]
    run.append("resumed", step=5)
    _train(run, 6, 6)
    assert not reader.news()["reset"], "resuming at the last step takes nothing back"


def test_when_the_next_save_is_due(tmp_path: Path) -> None:
    recipe = RecipeConfig(save_every_minutes=10, save_every_steps=40)
    config = RunConfig(name="r", model=ModelConfig(flux="f.safetensors"), dataset=DatasetConfig(folder="d"),
                       recipe=recipe)
    run = RunDirectory.create(tmp_path / "r", config, MANIFEST)
    _train(run, 1, 20)  # half a second each
    reader = follow.Follower(run.path)
    reader.begin()
    status = reader.snapshot()["status"]
    assert (status["save_in"], status["save_at"]) == (590, 40)
    _train(run, 21, 40)
    assert [reader.news()[key] for key in ("save_in", "save_at")] == [580, 80]
    run.append("saved", step=40, seconds=1.0)
    assert reader.news()["save_in"] == 600
    _train(run, 41, 42)
    run.transition("preparing")
    assert reader.news()["save_in"] == follow.Follower(run.path).snapshot()["status"]["save_in"] == 600
    _train(run, 43, 44)
    run.append("rolled_back", step=40)
    assert reader.news()["save_in"] == 600
    run.update(dataclasses.replace(config, recipe=RecipeConfig(save_every_minutes=0)))
    assert [reader.news()[key] for key in ("save_in", "save_at")] == [None, None]


def test_a_part_of_the_curve_is_merged_less_than_the_whole(run: RunDirectory) -> None:
    line = '{{"n": {n}, "t": 0, "type": "step", "step": {s}, "loss": {s}.5, "lr": 1e-06, "seconds": 1.0}}\n'
    begin = run.events()[-1]["n"]
    with open(run.path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(line.format(n=begin + s, s=s) for s in range(1, 9001)))
    reader = follow.Follower(run.path)
    whole = reader.snapshot()["losses"]
    assert whole[0][4] == 5
    part = reader.losses(101, 105)
    assert part == {"losses": [[s, s + 0.5, s + 0.5, s + 0.5, 1, 1e-6] for s in range(101, 106)], "n": begin + 9000}
    assert [b[4] for b in reader.losses(1, 3000)["losses"]] == [2] * 1500
    assert reader.losses(8999, 10**12)["losses"][-1][0] == 9000 and reader.losses(9001, 9002)["losses"] == []
    run.append("resumed", step=102)
    assert [b[0] for b in reader.losses(101, 105)["losses"]] == [101, 102], "the lost past is left out"


def test_a_loss_that_is_no_number_is_left_out(run: RunDirectory) -> None:
    reader = follow.Follower(run.path)
    reader.begin()
    run.append("step", step=1, loss=float("nan"), lr=1e-6, seconds=0.5)
    _train(run, 2, 3)
    assert [b[0] for b in reader.news()["losses"]] == [2, 3]
    assert [b[0] for b in reader.snapshot()["losses"]] == [2, 3]


def test_pictures_are_listed_by_step_and_only_those_inside_are_served(run: RunDirectory) -> None:
    for name, step in (("b.png", 20), ("a.png", 100)):
        (run.path / "samples" / name).write_bytes(b"picture")
        (run.path / "samples" / name).with_suffix(".json").write_text(f'{{"step": {step}, "prompt": "p"}}')
    (run.path / "samples" / "c.png").write_bytes(b"no sidecar")
    for name, about in (("d.png", '{"step": "12", "index": []}'), ("e.png", '{"step": true, "prompt": "p"}')):
        (run.path / "samples" / name).write_bytes(b"picture of others")
        (run.path / "samples" / name).with_suffix(".json").write_text(about)
    (run.path / "samples" / ".part-d.png").write_bytes(b"half-written")
    (run.path / "secret.png").write_bytes(b"outside")
    assert [s["file"] for s in follow.samples(run.path)] == ["c.png", "d.png", "e.png", "b.png", "a.png"]
    assert not any({"step", "index"} & s.keys() for s in follow.samples(run.path)[:3])
    assert follow.newest_sample(run.path) == "e.png"
    assert follow.sample_path(run.path, "a.png") == run.path.resolve() / "samples" / "a.png"
    for name in ("../secret.png", "a.json", "missing.png", "", ".", "..", str(run.path / "secret.png")):
        assert follow.sample_path(run.path, name) is None, name


def test_a_link_out_of_the_samples_folder_is_not_served(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.png").write_bytes(b"x")
    try:
        (run.path / "samples" / "link.png").symlink_to(tmp_path / "elsewhere.png")
    except OSError:
        pytest.skip("this system makes no symbolic links")
    assert follow.sample_path(run.path, "link.png") is None


def test_list_of_runs_follows_the_disk(run: RunDirectory) -> None:
    library = follow.Library()
    (run.path.parent / "cache").mkdir()
    assert [s["step"] for s in library.statuses(run.path.parent)] == [0]
    _train(run, 1, 3)
    assert [s["step"] for s in library.statuses(run.path.parent)] == [3]
    assert library.statuses(run.path.parent / "missing") == []


def test_a_run_of_the_list_is_the_one_that_is_looked_at(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    library, made = follow.Library(), []
    real = follow.RunDirectory
    monkeypatch.setattr(follow, "RunDirectory", lambda path: (made.append(path), real(path))[1])
    library.statuses(run.path.parent)
    _train(run, 1, 3)
    library.statuses(run.path.parent)
    assert library.follower(run.path).snapshot()["status"]["step"] == 3 and made == [run.path]


class Sent(list):
    def __call__(self, event: str, data: dict) -> None:
        assert event == "flux_fft.event"
        self.append(data)

    def wait_for(self, true: object, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not true(self):  # type: ignore[operator]
            assert time.monotonic() < end, list(self)
            time.sleep(0.01)


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "flux_fft_pusher"]


def test_pusher_sends_changes_while_watched_then_ends(run: RunDirectory) -> None:
    sent = Sent()
    push = pusher.Pusher(sent, interval=0.02)
    with push.watching(run.path, "7", "workflow"):
        run.transition("preparing")
        sent.wait_for(lambda s: s and s[-1]["places"] == [{"run": "r", "node_id": "7", "workflow_id": "workflow"}])
        push.say(run.path, "opening")
        sent.wait_for(lambda s: s[-1]["note"] == "opening")
        _train(run, 1, 4)
        # The status is read after the events, and may be ahead of them.
        sent.wait_for(lambda s: [b[0] for one in s for b in one["losses"]] == [1, 2, 3, 4])
    assert sent[-1]["step"] == 4
    run_state = sent[-1]["n"]
    sent.wait_for(lambda s: not _threads())
    assert sent[-1]["n"] == run_state and sent[-1]["note"] == "", "the last event takes the note back"
    before = len(sent)
    time.sleep(0.2)
    assert len(sent) == before, "nothing is sent when nothing is watched"


def test_pusher_is_silent_while_nothing_changes_and_survives_a_missing_run(run: RunDirectory) -> None:
    sent = Sent()
    push = pusher.Pusher(sent, interval=0.02)
    push.watch(run.path.parent / "not_there_yet")
    push.watch(run.path)
    sent.wait_for(lambda s: s)
    time.sleep(0.2)
    assert len(sent) == 1
    push.unwatch(run.path)
    push.unwatch(run.path.parent / "not_there_yet")
    sent.wait_for(lambda s: not _threads())


def test_what_could_not_be_sent_is_told_again(run: RunDirectory) -> None:
    sent, failed = Sent(), []

    def send(event: str, data: dict) -> None:
        if not failed:
            failed.append(data)
            raise OSError("the loop is busy")
        sent(event, data)

    push = pusher.Pusher(send, interval=0.02)
    with push.watching(run.path):
        sent.wait_for(lambda s: s)
        assert failed and sent[0]["since"] >= failed[0]["n"], "its reader sees that it missed some"
    sent.wait_for(lambda s: not _threads())


def test_a_run_that_takes_anothers_place_is_told_from_its_beginning(run: RunDirectory) -> None:
    sent = Sent()
    push = pusher.Pusher(sent, interval=0.02)
    library = follow.Library()
    with push.watching(run.path):
        _train(run, 1, 30)
        sent.wait_for(lambda s: s and s[-1]["step"] == 30)
        assert library.follower(run.path).snapshot()["status"]["step"] == 30
        config, old = run.config, run.uid
        run.delete()
        successor = RunDirectory.create(run.path, config, MANIFEST)
        _train(successor, 1, 3)
        sent.wait_for(lambda s: s[-1]["uid"] != old and s[-1]["step"] == 3)
    assert [b[0] for one in sent if one["uid"] != old for b in one["losses"]] == [1, 2, 3]
    assert [b[0] for b in library.follower(run.path).snapshot()["losses"]] == [1, 2, 3]


def _look(reader, run: RunDirectory, first: int) -> float:
    """Seconds of the processor for the news of one step, the median of twenty."""
    took = []
    for step in range(first, first + 20):
        run.append("step", step=step, loss=0.5, lr=1e-6, seconds=1.0)
        begin = time.process_time()
        assert len(reader.news()["losses"]) == 1
        took.append(time.process_time() - begin)
    return sorted(took)[len(took) // 2]


def test_news_of_a_long_run_cost_what_those_of_a_short_one_do(run: RunDirectory) -> None:
    reader = follow.Follower(run.path)
    reader.begin()
    short = _look(reader, run, 1)
    rng = random.Random(0)
    line = '{{"n": {n}, "t": 0, "type": "step", "step": {s}, "loss": {l:.6f}, "lr": 1e-06, "seconds": 1.0}}\n'
    last = run.events()[-1]["n"]
    text = "".join(line.format(n=last + 1 + k, s=21 + k, l=rng.random()) for k in range(19_980))
    with open(run.path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(text)
    reader.begin()
    assert len(reader.snapshot()["losses"]) == follow.MOST_BINS
    assert _look(reader, run, 20_001) < 4 * short + 0.002


def test_a_run_at_which_nothing_happens_is_not_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent()
    push = pusher.Pusher(sent, interval=0.01)
    push.watch(run.path)
    sent.wait_for(lambda s: s)
    reads = []
    monkeypatch.setattr(follow.RunDirectory, "status", lambda self: reads.append(1))
    time.sleep(0.3)
    push.unwatch(run.path)
    assert not reads


@contextlib.contextmanager
def _opened(run: RunDirectory) -> Iterator[None]:
    """As a worker has it open."""
    with run.lock():
        run.address_file.write_text("{}", encoding="utf-8")
        yield
        run.address_file.unlink()


def test_how_far_a_save_is_is_told_while_the_run_rests_too_and_till_it_is_done(run: RunDirectory) -> None:
    sent = Sent()
    push = pusher.Pusher(sent, interval=0.02)
    for state in ("preparing", "paused"):
        run.transition(state)

    def written(count: int) -> dict:
        return {"what": "save point", "step": 3, "done": count, "total": 100}

    def write(folder: Path) -> None:
        for wanted in map(written, (20, 60)):
            (folder / "a.bin").write_bytes(bytes(wanted["done"]))
            sent.wait_for(lambda s, wanted=wanted: s[-1]["saving"] == wanted)

    with _opened(run):
        push.follow(run.path)
        sent.wait_for(lambda s: s)
        assert sent[-1]["saving"] is None
        events = len(run.events())
        with underway.noted(run.path, underway.SAVE_POINT, 3, 100):
            run.write_save_point(3, write)
        sent.wait_for(lambda s: s[-1]["saving"] is None)
        assert len(run.events()) == events
    assert follow.Follower(run.path).snapshot()["status"]["saving"] is None


def test_an_export_of_which_no_loader_can_be_asked_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    routes, sent = _load("routes"), []

    def failing(*_: object) -> None:
        raise ValueError("path is on mount 'D:'")

    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(
        instance=types.SimpleNamespace(send_sync=lambda *told: sent.append(told)))
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setattr(routes.bridge_files, "listed_as", failing)
    event = {"type": "exported", "folder": "x", "file": "a.safetensors"}
    routes._send("flux_fft.event", {"happened": [dict(event)]})
    assert sent == [("flux_fft.event", {"happened": [event]})]

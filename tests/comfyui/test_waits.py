"""What Train Steps waits for, and shows meanwhile: a slow save, others' pictures; and what it needs no file for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.comfyui.graphs import demo, start, train, with_previews
from tests.comfyui.server import Graph, Install, Node, Result, Server
from trainer.client import open_run
from trainer.run import RunDirectory

SLOW_DISK = """
import os, time
real = os.fsync
def fsync(file):
    time.sleep(0.4)
    real(file)
os.fsync = fsync
"""
"""A ``sitecustomize`` for the server and its workers."""


def pictures(server: Server, name: str) -> list[int]:
    return sorted({int(p.name[5:11]) for p in (server.home / name / "samples").glob("step-*.png")})


@pytest.fixture(scope="module")
def slow(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose disk takes its time."""
    base = tmp_path_factory.mktemp(f"slow-{install.version}")
    (base / "slow").mkdir()
    (base / "slow" / "sitecustomize.py").write_text(SLOW_DISK, encoding="utf-8")
    running = Server(install, base, {"PYTHONPATH": str(base / "slow")})
    try:
        yield running
    finally:
        running.stop()


class Watched:
    """What ComfyUI's bar of a node, and the panel, are told; ``deed`` is done once, when ``when`` says so."""

    def __init__(self, node: str, run: RunDirectory, when: Callable[[Watched], object] = lambda _: False,
                 deed: Callable[[], object] = lambda: None) -> None:
        self.node, self.run, self.when, self.deed = node, run, when, deed
        self.bars: list[dict] = []
        self.saves: list[dict] = []
        self.done = False

    def __call__(self, message: dict) -> None:
        data = message.get("data") or {}
        if message["type"] == "progress" and data.get("node") == self.node:
            self.bars.append(data)
        if message["type"] == "flux_fft.event" and data["run"] == self.run.name and data["saving"]:
            self.saves.append(data["saving"])
        if not self.done and self.when(self):
            self.done = True
            self.deed()

    def written(self) -> list[int]:
        """The bytes that the bar has shown."""
        totals = {one["total"] for one in self.saves}
        return [bar["value"] for bar in self.bars if bar["max"] in totals]


def is_not_saving(server: Server, name: str) -> None:
    deadline = time.monotonic() + 30
    while server.get(f"/flux_fft/runs/{name}")["status"]["saving"] is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def begun(server: Server, name: str) -> tuple[Graph, Node, RunDirectory]:
    """A graph whose run is at step 3, saved, and its Train Steps."""
    g = Graph()
    trained = train(g, demo(g), name, 3)
    assert not server.run(g, seconds=240).error
    return g, trained, RunDirectory(server.home / name)


def test_a_slow_save_at_the_target_is_shown_while_it_lasts(slow: Server) -> None:
    g, trained, run = begun(slow, "target")
    g[trained]["inputs"]["steps"] = 5
    look = Watched(trained, run)
    assert not slow.run(g, seconds=240, on_message=look).error
    assert {(one["what"], one["step"]) for one in look.saves} == {("save point", 5)}
    done = [one["done"] for one in look.saves]
    assert done == sorted(done) and look.written() and look.written() == sorted(look.written())
    assert look.bars[-1]["value"] == look.bars[-1]["max"] == 2, "the bar is that of the steps again"
    is_not_saving(slow, "target")


def test_a_slow_save_on_stop_is_shown_while_it_lasts(slow: Server) -> None:
    g, trained, run = begun(slow, "stops")
    g[trained]["inputs"]["steps"] = 1_000_000

    def stop() -> None:
        threading.Thread(target=lambda: slow.post("/flux_fft/runs/stops/stop", {}), daemon=True).start()

    look = Watched(trained, run, lambda w: any(bar["value"] >= 2 for bar in w.bars), stop)
    assert slow.run(g, seconds=240, on_message=look).interrupted
    assert look.saves and look.written(), "Train Steps shows it before its prompt ends"
    is_not_saving(slow, "stops")
    deadline = time.monotonic() + 60
    while run.locked():
        assert time.monotonic() < deadline
    assert run.status()["state"] == "stopped" and run.status()["save_point_step"] == run.status()["step"]


def test_a_worker_that_dies_in_a_slow_save_leaves_no_word_of_it_and_the_run_goes_on(slow: Server) -> None:
    g, trained, run = begun(slow, "dies")
    g[trained]["inputs"]["steps"] = 6

    def kill() -> None:
        psutil.Process(json.loads(run.address_file.read_text(encoding="utf-8"))["pid"]).kill()

    look = Watched(trained, run, lambda w: any(one["done"] for one in w.saves), kill)
    result = slow.run(g, seconds=240, on_message=look)
    assert result.error_node == trained and "\n" not in result.error and look.saves
    status = slow.get("/flux_fft/runs/dies")["status"]
    assert (status["state"], status["saving"], status["resume_step"]) == ("interrupted", None, 3)
    assert not slow.run(g, seconds=240).error
    assert run.status()["step"] == 6 and [p.step for p in run.save_points()] == [6]


def test_a_run_whose_model_is_gone_is_trained_and_previewed_on(server: Server) -> None:
    for name in ("bereft", "beside"):
        g = Graph()
        train(g, demo(g), name, 4)
        assert not server.run(g, seconds=240).error
    with open_run(server.home / "bereft", launch=False) as client:
        client.stop()
    run = RunDirectory(server.home / "bereft")
    flux = Path(run.config.model.flux)
    away = flux.rename(flux.with_suffix(".away"))
    server.forget()
    try:
        g = Graph()
        opened = g.add("FluxFFTOpenRun", run_name="bereft")
        previews = with_previews(g, every=2)
        onward = g.add("FluxFFTTrainSteps", run=opened, steps=3, previews=previews)
        looked = g.add("FluxFFTPreview", run=onward, previews=previews)
        result = server.run(g, seconds=240)
        assert not result.error, result.error
        assert server.steps("bereft") == list(range(1, 8)) and "at step 7, sampled" in result.text(looked)
        assert pictures(server, "bereft") == [6, 7]
    finally:
        away.rename(flux)


@pytest.fixture(scope="module")
def second(server: Server, install: Install, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another server, of the same home."""
    running = Server(install, tmp_path_factory.mktemp("second"), {"FLUX_FFT_HOME": str(server.home)})
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("every", "due"), [(5, {4, 8, 12, 15, 20}), (4, {4, 8, 12, 16, 20})])
def test_two_servers_train_one_run_each_with_its_own_pictures(server: Server, second: Server, every: int,
                                                              due: set[int]) -> None:
    name = f"shared_{every}"

    def graph(steps: int, every: int, prompt: str) -> tuple[Graph, Node]:
        g = Graph()
        previews = with_previews(g, every=every, prompts=prompt)
        return g, g.add("FluxFFTTrainSteps", run=start(g, demo(g), name), steps=steps, previews=previews)

    (mine, my_node), (other, other_node) = graph(12, 4, "a red circle"), graph(20, every, "a blue square")
    found: list[Result] = []
    joined = threading.Thread(target=lambda: found.append(second.run(other, seconds=240)))

    def join(message: dict) -> None:
        data = message.get("data") or {}
        if message["type"] == "progress" and data.get("node") == my_node and not joined.ident:
            joined.start()

    first = server.run(mine, seconds=240, on_message=join)
    joined.join(240)
    assert not first.error and not first.interrupted, first.error
    assert found and not found[0].error and not found[0].interrupted, found and found[0].error
    status = server.status(name)
    assert (status["step"], status["state"]) == (20, "finished")
    assert server.steps(name) == list(range(1, 21))
    assert due <= set(pictures(server, name)), (first.text(my_node), found[0].text(other_node))


def test_a_run_that_is_trained_on_while_it_is_sampled_goes_on_without_those_pictures(server: Server) -> None:
    name = "moved_on"
    g = Graph()
    previews = with_previews(g, 4, "a red circle\na blue star\na green square")
    g[previews]["inputs"]["sampling_steps"] = 60  # long enough for another program to be done with its own
    trained = train(g, demo(g), name, 10, previews=previews)
    moved = False

    def move_on(message: dict) -> None:
        nonlocal moved
        if not moved and message["type"] == "flux_fft.event" and message["data"]["on_the_way"] is not None:
            moved = True
            with open_run(server.home / name, launch=False) as other:
                other.train(6)

    result = server.run(g, seconds=240, on_message=move_on)
    assert moved and not result.error and not result.interrupted, result.error
    assert server.steps(name) == list(range(1, 11)) and pictures(server, name) == [8]
    assert "Pictures of 1 step (4) were not taken: another program" in result.text(trained)
    rests = [e for e in RunDirectory(server.home / name).events_of("state") if e["state"] == "paused"]
    assert all(e.get("on_the_way") for e in rests[1:]), "nobody has paused it"


@pytest.mark.parametrize("action", ["pause", "stop"])
def test_pause_and_stop_count_while_previews_are_sampled(server: Server, action: str) -> None:
    name = f"sampled_{action}"
    g = Graph()
    previews = with_previews(g, 5, "a red circle\na blue star\na green square")
    g[previews]["inputs"]["sampling_steps"] = 60  # long enough to press a button in
    trained = train(g, demo(g), name, 1_000_000, previews=previews)
    asked = threading.Thread(target=lambda: server.post(f"/flux_fft/runs/{name}/{action}", {}))
    pressed = False

    def press(message: dict) -> None:
        nonlocal pressed
        data = message.get("data") or {}
        its = message["type"] == "flux_fft.event" and data["run"] == name
        if not pressed and its and data["on_the_way"] is not None:
            pressed = True
            asked.start()

    assert server.run(g, seconds=240, on_message=press).interrupted
    asked.join(60)
    run = RunDirectory(server.home / name)
    ended = run.status()
    assert ended["state"] == {"pause": "paused", "stop": "stopped"}[action] and ended["step"] == 5
    assert not pictures(server, name), "it does not wait for them"
    time.sleep(2)
    assert run.status()["state"] == ended["state"] and run.locked() == (action == "pause"), "nothing undoes it"

    g[trained]["inputs"]["steps"] = 7
    g[previews]["inputs"]["sampling_steps"] = 2
    assert not server.run(g, seconds=240).error
    assert server.steps(name) == list(range(1, 8)), "and it goes on from there"
    assert pictures(server, name) == [5], "with the pictures that were cut short"


@pytest.mark.parametrize("action", ["pause", "stop"])
def test_pause_and_stop_count_while_the_worker_loads(server: Server, action: str) -> None:
    name = f"loads_{action}"
    g = Graph()
    train(g, demo(g), name, 1_000_000)
    asked = threading.Thread(target=lambda: server.post(f"/flux_fft/runs/{name}/{action}", {}))
    pressed = False

    def press(message: dict) -> None:
        nonlocal pressed
        data = message.get("data") or {}
        its = message["type"] == "flux_fft.event" and data["run"] == name
        if not pressed and its and data["state"] == "preparing":
            pressed = True
            asked.start()

    assert server.run(g, seconds=240, on_message=press).interrupted
    asked.join(60)
    assert pressed
    deadline = time.monotonic() + 60
    run = RunDirectory(server.home / name)
    wanted = ("paused",) if action == "pause" else ("stopped", "paused")  # asked before there was a worker: it rests
    while run.status()["state"] not in wanted:
        assert time.monotonic() < deadline, run.status()
        time.sleep(0.1)
    time.sleep(2)
    assert run.status()["state"] in wanted and server.steps(name) == [], "and nothing has it train"

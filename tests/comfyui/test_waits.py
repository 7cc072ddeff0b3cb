"""What Train Steps waits for, and shows meanwhile: a slow save, others' pictures; and what it needs no file for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

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


def test_a_slow_save_is_shown_while_it_lasts(install: Install, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_DISK, encoding="utf-8")
    server = Server(install, tmp_path, {"PYTHONPATH": str(tmp_path / "slow")})
    try:
        g = Graph()
        trained = train(g, demo(g), "slow", 3)
        bars: list[dict] = []
        told: list[dict | None] = []

        def look(message: dict) -> None:
            data = message.get("data") or {}
            if message["type"] == "progress" and data.get("node") == trained:
                bars.append(data)
            if message["type"] == "flux_fft.event" and data["run"] == "slow":
                told.append(data["saving"])

        result = server.run(g, seconds=240, on_message=look)
        assert not result.error, result.error
        size = sum(f.stat().st_size for f in RunDirectory(server.home / "slow").source().path.iterdir())
        written = [bar["value"] for bar in bars if bar["max"] > 0.9 * size]
        assert written and written == sorted(written), "the bar shows the bytes"
        shown = [one for one in told if one]
        assert shown and {(one["what"], one["step"]) for one in shown} == {("save point", 3)}
        assert [one["done"] for one in shown] == sorted(one["done"] for one in shown)
        deadline = time.monotonic() + 30
        while server.get("/flux_fft/runs/slow")["status"]["saving"] is not None:
            assert time.monotonic() < deadline
    finally:
        server.stop()


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


@pytest.mark.slow
def test_two_servers_train_one_run_each_with_its_own_pictures(server: Server, install: Install, tmp_path: Path) -> None:
    second = Server(install, tmp_path, {"FLUX_FFT_HOME": str(server.home)})
    try:
        def graph(steps: int, every: int, prompt: str) -> tuple[Graph, Node]:
            g = Graph()
            previews = with_previews(g, every=every, prompts=prompt)
            begun = start(g, demo(g), "shared")
            return g, g.add("FluxFFTTrainSteps", run=begun, steps=steps, previews=previews)

        (mine, my_node), (other, other_node) = graph(12, 4, "a red circle"), graph(20, 5, "a blue square")
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
        status = server.status("shared")
        assert (status["step"], status["state"]) == (20, "finished")
        assert server.steps("shared") == list(range(1, 21))
        assert {4, 8, 12} <= set(pictures(server, "shared")), first.text(my_node)
        assert {15, 20} <= set(pictures(server, "shared")), found[0].text(other_node)
    finally:
        second.stop()

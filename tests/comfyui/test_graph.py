"""Graphs through ``/prompt`` of a real server: training, steps as targets, Cancel, order, and what may not happen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest

from tests.comfyui.graphs import delete, demo, four_nodes, train
from tests.comfyui.server import Graph, Server
from trainer.client import open_run
from trainer.weights import TensorFile


def test_four_nodes_train(placed: Server) -> None:
    result = placed.run(four_nodes("four", 2))

    assert not result.error
    assert sorted(result.executed) == ["1", "2", "3", "4"] and result.executed[-2:] == ["3", "4"]
    assert placed.steps("four") == [1, 2]
    status = placed.status("four")
    assert (status["state"], status["step"], status["target"]) == ("finished", 2, 2)
    assert "16 pictures" in result.text("3")
    assert "from step 0 to 2" in result.text("4")

    wrong = four_nodes("four", 2)
    wrong["2"]["inputs"]["folder"] = "nowhere"
    error = placed.run(wrong).error
    assert "nowhere does not exist" in error and "another run" not in error


def test_the_loss_at_fixed_noise_falls(server: Server) -> None:
    g = Graph()
    train(g, demo(g), "falls", 60)

    assert not server.run(g, seconds=300).error

    first, last = evaluations(server, "falls")
    assert last <= 0.7 * first, (first, last)


def test_a_learning_rate_of_0_changes_nothing(server: Server) -> None:
    g = Graph()
    parts = demo(g)
    still = g.add("FluxFFTOptimizerNAdam", learning_rate="0", nesterov=True, cautious=True, weight_decay=0.0,
                  decoupled_decay=True, beta1=0.9, beta2=0.999, eps="1e-8", state_format="f32", weight_precision="f32")
    trained = train(g, parts._replace(optimizer=still.out(0)), "still", 5)
    g.add("FluxFFTExport", run=trained, filename="still", dtype="f32", overwrite=False)

    assert not server.run(g).error

    first, last = evaluations(server, "still")
    assert first == last
    with (TensorFile(server.home / "demo/flux_demo.safetensors") as before,
          TensorFile(server.base / "models/diffusion_models/still.safetensors") as after):
        assert set(before.tensors) == set(after.tensors)
        for name in before.tensors:
            assert before.load(name).equal(after.load(name)), name


def evaluations(server: Server, name: str) -> tuple[float, float]:
    """The loss at fixed noise and timesteps before the first step and after the last."""
    found = [e for e in server.events(name) if e["type"] == "eval"]
    assert found[0]["step"] == 0
    assert found[-1]["step"] == server.steps(name)[-1]
    return found[0]["loss"], found[-1]["loss"]


def test_steps_are_targets(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "targets", 4)
    server.run(g)
    assert server.steps("targets") == [1, 2, 3, 4]

    again = server.run(g)
    assert not again.error
    assert again.executed == [], "an unchanged graph comes from the cache"
    assert server.steps("targets") == [1, 2, 3, 4]
    assert "queueing again trains nothing" in again.text(trained)

    g[trained]["inputs"]["steps"] = 7
    more = server.run(g)
    assert more.executed == [trained], "Start does not run again"
    assert server.steps("targets") == [1, 2, 3, 4, 5, 6, 7]

    g[trained]["inputs"]["steps"] = 5
    less = server.run(g)
    assert "Nothing to train" in less.text(trained)
    assert server.steps("targets") == [1, 2, 3, 4, 5, 6, 7]


def test_a_save_that_failed_at_the_target_is_tried_again(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "unsaved", 2)
    server.run(g)
    state = server.home / "unsaved" / "state"
    shutil.rmtree(state)
    state.write_text("in the way", encoding="utf-8")
    g[trained]["inputs"]["steps"] = 3
    assert "save point of step 3" in server.run(g).error
    assert server.status("unsaved")["state"] == "failed"

    state.unlink()
    assert not server.run(g).error
    status = server.status("unsaved")
    assert (status["state"], status["step"], status["save_point_step"]) == ("finished", 3, 3)
    assert server.steps("unsaved") == [1, 2, 3]


def test_a_restart_attaches(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "attach", 2)
    server.run(g)
    server.forget()

    again = server.run(g)
    assert trained in again.executed and not again.error
    assert "goes on from step 2" in again.text("2")
    assert "Nothing to train" in again.text(trained)
    assert server.steps("attach") == [1, 2]

    server.forget()
    g[trained]["inputs"]["steps"] = 3
    assert not server.run(g).error
    assert server.steps("attach") == [1, 2, 3]


@pytest.mark.parametrize("queued", [1, 2])
def test_deleting_a_run_starts_it_anew(server: Server, queued: int) -> None:
    g = Graph()
    trained = train(g, demo(g), "deleted", 1)
    for _ in range(queued):
        assert not server.run(g).error
    delete(server, "deleted")

    again = server.run(g)

    assert again.executed == ["2", trained]
    assert server.steps("deleted") == [1]
    assert server.run(g).executed == []


def done(message: dict, node: str) -> int:
    """Steps that a node's progress bar shows in a message of the websocket; -1 if it is about something else."""
    data = message.get("data") or {}
    return data["value"] if message["type"] == "progress" and data.get("node") == node else -1


def test_cancel_stops_within_a_step_and_queueing_goes_on(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "cancel", 3000)
    told: list[float] = []

    def cancel_at_some_step(message: dict) -> None:
        if done(message, trained) >= 5 and not told:
            server.interrupt()
            told.append(time.time())

    result = server.run(g, seconds=300, on_message=cancel_at_some_step)

    assert result.interrupted and not result.error
    status = server.status("cancel")
    assert status["state"] == "paused"
    stopped_at = status["step"]
    assert 5 <= stopped_at < 3000
    events = server.events("cancel")
    paused = next(e for e in events if e["type"] == "state" and e["state"] == "paused")
    after_cancel = [e for e in events if e["type"] == "step" and e["n"] > paused["n"]]
    assert not after_cancel
    last = [e for e in events if e["type"] == "step"][-1]
    late = paused["t"] - told[0]
    # Of minutes of training: Cancel is heard at the next look, and the step under way is the last one.
    assert late < 10 + last["seconds"], f"it trained on for {late:.1f} s"
    assert server.steps("cancel") == list(range(1, stopped_at + 1))

    g[trained]["inputs"]["steps"] = stopped_at + 3
    again = server.run(g)
    assert not again.error
    assert server.steps("cancel") == list(range(1, stopped_at + 4)), "it goes on where it was, without a repeated step"


def test_the_prompt_ends_when_the_worker_is_killed(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "killed", 100000)

    killed: list[int] = []

    def kill(message: dict) -> None:
        if done(message, trained) >= 3 and not killed:
            pid = json.loads((server.home / "killed/worker.json").read_text())["pid"]
            killed.append(pid)
            os.kill(pid, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)

    result = server.run(g, seconds=120, on_message=kill)

    assert killed
    assert result.error_node == trained
    assert "\n" not in result.error.strip()
    assert "killed" in result.error
    g[trained]["inputs"]["steps"] = 2
    assert not server.run(g).error, "the canvas goes on"


def test_the_run_may_be_paused_from_elsewhere(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "elsewhere", 100000)
    asked: list[bool] = []

    def pause(message: dict) -> None:
        if done(message, trained) >= 3 and not asked:
            asked.append(True)
            with open_run(server.home / "elsewhere", launch=False) as client:
                client.pause()

    result = server.run(g, seconds=120, on_message=pause)

    assert asked and result.interrupted
    assert server.status("elsewhere")["state"] == "paused"


def test_a_smaller_target_of_another_program_ends_the_wait(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "smaller", 100000)
    asked: list[int] = []

    def set_target(message: dict) -> None:
        if done(message, trained) >= 3 and not asked:
            with open_run(server.home / "smaller", launch=False) as client:
                asked.append(client.status()["step"] + 100)
                client.train(asked[0])

    result = server.run(g, seconds=120, on_message=set_target)

    assert result.error_node == trained
    assert f"target to {asked[0]}" in result.error and "queue again" in result.error and "\n" not in result.error
    assert server.status("smaller")["state"] == "finished"
    g[trained]["inputs"]["steps"] = asked[0] + 2
    assert not server.run(g).error
    assert server.steps("smaller")[-1] == asked[0] + 2


@pytest.mark.parametrize("harm", ["deleted", "damaged", "list"])
def test_lost_data_is_made_anew_by_queueing_again(server: Server, harm: str) -> None:
    g = Graph()
    trained = train(g, demo(g), f"lost_{harm}", 1)
    assert not server.run(g).error
    with open_run(server.home / f"lost_{harm}", launch=False) as client:
        client.stop()
    latents = list((server.home / "cache/latents").rglob("*.safetensors"))
    assert len(latents) >= 16
    if harm == "deleted":
        shutil.rmtree(server.home / "cache")
    elif harm == "damaged":
        for path in latents:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    else:
        (server.home / f"lost_{harm}/dataset.json").write_text("{")

    g[trained]["inputs"]["steps"] = 3
    broken = server.run(g)
    assert broken.error_node == trained
    assert "Start" in broken.error and "\n" not in broken.error and "Traceback" not in broken.error

    again = server.run(g)
    assert not again.error
    assert again.executed == ["2", trained]
    assert server.steps(f"lost_{harm}") == [1, 2, 3]


def test_an_impossible_plan_costs_no_encoding(server: Server) -> None:
    g = Graph()
    parts = demo(g)
    data = g.add("FluxFFTDataset", folder=str(server.home / "demo/drawings"), resolution=8192, trigger_word="",
                 bucket_step=64, upscale=True)
    recipe = g.add("FluxFFTRecipe", **{k: v[1]["default"] for k, v in server.get("/object_info/FluxFFTRecipe")[
        "FluxFFTRecipe"]["input"]["required"].items()} | {"batch_size": 1024})
    assert not server.run(g | {"99": {"class_type": "PreviewAny", "inputs": {"source": parts.dataset}}}).error
    train(g, parts._replace(dataset=data.out(0), recipe=recipe.out(0)), "impossible", 1)
    before = set((server.home / "cache").rglob("*"))

    result = server.run(g)

    assert "does not fit this machine" in result.error
    assert set((server.home / "cache").rglob("*")) == before

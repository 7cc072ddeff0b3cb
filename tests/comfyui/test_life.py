"""A run through a server that is killed, interrupted and restarted; runs as they were; what others do to them."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.comfyui.graphs import demo, start, train, with_defaults, with_previews
from tests.comfyui.server import Graph, Install, Rejected, Server
from trainer.client import open_run
from trainer.run import RunDirectory


def at_step(server: Server, node: str, step: int, deed: Callable[[], object]) -> Callable[[dict], None]:
    """For ``on_message``: do it once, when the bar of ``node`` shows ``step``."""
    done: list[bool] = []

    def look(message: dict) -> None:
        data = message.get("data") or {}
        if message["type"] == "progress" and data.get("node") == node and data["value"] >= step and not done:
            done.append(True)
            deed()

    return look


def let_go(run: RunDirectory) -> dict:
    """Wait until no worker has the run; its status then."""
    deadline = time.monotonic() + 60
    while run.locked():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.05)
    return run.status()


def die_at(server: Server, graph: Graph, node: str, step: int, number: signal.Signals) -> float:
    """Queue the graph and send the server a signal when ``node`` is at a step of its bar; when that was."""
    sent: list[float] = []

    def strike() -> None:
        sent.append(time.time())
        server.process.send_signal(number)

    with contextlib.suppress(Exception):  # the socket breaks
        server.run(graph, seconds=240, on_message=at_step(server, node, step, strike))
    assert sent, server.tail()
    server.process.wait(60)
    return sent[0]


@pytest.mark.slow
def test_killed_interrupted_and_restarted_a_run_goes_on_where_it_was(install: Install, tmp_path: Path) -> None:
    g = Graph()
    trained = train(g, demo(g), "lives", 100_000)
    servers = [Server(install, tmp_path)]
    try:
        die_at(servers[0], g, trained, 3, signal.SIGKILL)
        run = RunDirectory(servers[0].home / "lives")
        first = let_go(run)
        assert first["state"] == "stopped" and first["save_point_step"] == first["step"] >= 3

        servers.append(Server(install, tmp_path))
        kept = json.loads((run.path / "graph.json").read_text(encoding="utf-8"))
        assert kept == {"prompt": g, "workflow": None, "node_id": trained}
        result = servers[1].run(kept["prompt"], seconds=240,
                                on_message=at_step(servers[1], trained, 3, servers[1].interrupt))
        assert result.interrupted
        second = run.status()
        assert second["state"] == "paused" and second["step"] > first["step"]
        assert second["save_point_step"] == first["step"], "Cancel writes nothing"

        sent = die_at(servers[1], g, trained, 3, signal.SIGINT)
        third = let_go(run)
        assert third["state"] == "stopped" and third["save_point_step"] == third["step"] > second["step"]
        late = [e for e in run.events() if e["type"] == "step" and e["t"] > sent]
        print(f"{len(late)} steps, {late[-1]['t'] - sent if late else 0:.1f} s, were made after Ctrl-C")

        servers.append(Server(install, tmp_path))
        g[trained]["inputs"]["steps"] = third["step"] + 2
        assert not servers[2].run(g, seconds=240).error
        assert servers[2].steps("lives") == list(range(1, third["step"] + 3)), "no step is lost, none repeated"
        assert [e["step"] for e in run.events() if e["type"] == "resumed"] == [first["step"], third["step"]]
    finally:
        for server in servers:
            server.stop()


def test_a_larger_target_of_another_program_ends_the_wait_at_ones_own(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "larger", 40)

    def raise_target() -> None:
        with open_run(server.home / "larger", launch=False) as client:
            client.train(100_000)

    result = server.run(g, seconds=240, on_message=at_step(server, trained, 3, raise_target))

    assert not result.error and not result.interrupted
    assert "from step 0 to 40" in result.text(trained) and "Another program trains it on" in result.text(trained)
    with open_run(server.home / "larger", launch=False) as client:
        assert client.status()["state"] == "training"
        client.stop()


def test_pictures_that_another_program_wants_on_the_way_end_no_wait(server: Server) -> None:
    g = Graph()
    trained = train(g, demo(g), "ontheway", 60)

    def sample_at(step: int) -> None:
        with open_run(server.home / "ontheway", launch=False) as client:
            client.train(60, pause_at=step)
            while client.status()["on_the_way"] != step:
                time.sleep(0.05)
            client.train(60)

    result = server.run(g, seconds=240, on_message=at_step(server, trained, 3, lambda: sample_at(30)))

    assert not result.error and not result.interrupted
    assert server.status("ontheway")["step"] == 60


def test_pictures_that_were_cut_off_are_taken_when_it_goes_on(server: Server) -> None:
    g = Graph()
    previews = with_previews(g, every=4)
    trained = train(g, demo(g), "cutoff", 6, previews=previews)
    samples = server.home / "cutoff" / "samples"
    assert not server.run(g, seconds=240).error
    kept = sorted(p.name for p in samples.iterdir())
    assert len(kept) == 2 and kept[0].startswith("step-000004")
    assert "queueing again" in server.run(g).text(trained)

    # As if the run had been cut off in the middle of its pictures, at its last step: those of the 4th lie behind it.
    g[trained]["inputs"]["steps"] = 8
    assert not server.run(g, seconds=240).error
    assert len({p.name[:11] for p in samples.glob("*.png")}) == 2
    for path in samples.glob("step-000008*"):
        path.unlink()
    g[trained]["inputs"]["steps"] = 9  # goes on from 8, where pictures are due
    assert not server.run(g, seconds=240).error
    assert len(list(samples.glob("step-000008*.png"))) == 1
    assert server.steps("cutoff") == list(range(1, 10))


def test_a_run_as_it_was_is_looked_at_and_never_trained(server: Server, install: Install) -> None:
    g = Graph()
    parts = demo(g)
    recipe = with_defaults(server, g, "FluxFFTRecipe", batch_size=4, save_every_steps=2, keep_save_points=5)
    trained = train(g, parts._replace(recipe=recipe.out(0)), "asitwas", 5)
    assert not server.run(g, seconds=240).error
    home, events = server.home / "asitwas", len(server.events("asitwas"))

    look = Graph()
    opened = look.add("FluxFFTOpenRun", run_name="asitwas", at="2")
    export = look.add("FluxFFTExport", run=opened, filename="asitwas_2", dtype="bf16", overwrite=False)
    result = server.run(look, seconds=240)
    assert not result.error and "kept at step 2" in result.text(opened) and "step 2" in result.text(export)
    if install.at_least(0, 9):  # before, ComfyUI loads only the width of FLUX.1
        pictures = look.add("FluxFFTPreview", run=opened, previews=with_previews(look))
        result = server.run(look, seconds=240)
        assert not result.error and "at step 2, sampled" in result.text(pictures)
        assert [p for p in (home / "samples").glob("step-000002*.png")]
    told = [e["type"] for e in server.events("asitwas")[events:]]
    assert "step" not in told and server.status("asitwas")["step"] == 5

    wrong = Graph()
    opened = wrong.add("FluxFFTOpenRun", run_name="asitwas", at="2")
    onward = wrong.add("FluxFFTTrainSteps", run=opened, steps=3)
    result = server.run(wrong)
    assert result.error_node == onward and "roll it back" in result.error and "\n" not in result.error
    assert trained and server.steps("asitwas") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("at, word", [("3", "it has 2, 4"), ("soon", "latest"), ("-1", "latest")])
def test_a_step_that_was_not_kept_is_told_with_those_that_were(server: Server, at: str, word: str) -> None:
    if not (server.home / "notkept").exists():
        g = Graph()
        recipe = with_defaults(server, g, "FluxFFTRecipe", batch_size=4, save_every_steps=2, keep_save_points=5)
        train(g, demo(g)._replace(recipe=recipe.out(0)), "notkept", 4)
        assert not server.run(g, seconds=240).error
    g = Graph()
    opened = g.add("FluxFFTOpenRun", run_name="notkept", at=at)
    g.add("FluxFFTLossPlot", run=opened, smoothing=0.5)
    result = server.run(g)
    assert result.error_node == opened and word in result.error and f"at is '{at}'" in result.error
    g[opened]["inputs"]["run_name"] = "no_such_run"  # told once, whatever else is wrong
    with pytest.raises(Rejected) as refusal:
        server.run(g)
    told = refusal.value.errors["node_errors"][opened]["errors"]
    assert [e["extra_info"]["input_name"] for e in told] == ["run_name"] and "no_such_run" in told[0]["details"]


def test_another_optimizer_is_taken_with_fresh_moments(server: Server) -> None:
    g = Graph()
    parts = demo(g)
    trained = train(g, parts, "fresh", 3)
    assert not server.run(g, seconds=240).error
    other = with_defaults(server, g, "FluxFFTOptimizerAdan", learning_rate="1e-4")
    begun = start(g, parts._replace(optimizer=other.out(0)), "fresh")
    g[trained]["inputs"] |= {"run": begun.out(0), "steps": 5}
    refused = server.run(g).error
    assert "optimizer.kind" in refused and "continue with fresh moments" in refused
    g[begun]["inputs"]["if_different"] = "continue with fresh moments"
    result = server.run(g, seconds=240)
    assert not result.error and "begin anew at step 3" in result.text(begun)
    assert server.steps("fresh") == [1, 2, 3, 4, 5]
    resumed = [e for e in server.events("fresh") if e["type"] == "resumed"]
    assert [(e["step"], e.get("fresh")) for e in resumed] == [(3, True)]
    again = server.run(g, seconds=240)
    assert not again.error and begun not in again.executed
    assert server.steps("fresh") == [1, 2, 3, 4, 5]


def test_previews_may_be_of_the_average(server: Server) -> None:
    g = Graph()
    recipe = with_defaults(server, g, "FluxFFTRecipe", batch_size=4, ema_decay=0.5)
    previews = with_previews(g, every=2)
    g[previews]["inputs"]["average"] = True
    train(g, demo(g)._replace(recipe=recipe.out(0)), "averaged", 3, previews=previews)
    assert not server.run(g, seconds=240).error
    about = [json.loads(p.read_text(encoding="utf-8")) for p in (server.home / "averaged/samples").glob("*.json")]
    assert [(a["step"], a["average"]) for a in about] == [(2, True)]

    g = Graph()
    previews = with_previews(g, every=2)
    g[previews]["inputs"]["average"] = True
    trained = train(g, demo(g), "plain", 3, previews=previews)
    result = server.run(g)
    assert result.error_node == trained and "ema_decay" in result.error and server.steps("plain") == []

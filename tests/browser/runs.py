"""Runs to look at: the demo graph on a page, waited for and ended; a long past that nobody trained."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.browser.canvas import Canvas
from tests.comfyui.server import Server
from trainer.config import DatasetConfig, ModelConfig, RunConfig
from trainer.run import RunDirectory

DEMO = Path(__file__).resolve().parents[2] / "example_workflows" / "demo on any machine - Flux full fine-tune.json"
EMPTY = {"last_node_id": 0, "last_link_id": 0, "nodes": [], "links": [], "version": 0.4}
MANY = 1_000_000
"""More steps than are trained while a test lasts."""
_MANIFEST = {"format": 1, "cache": "cache", "empty_caption": "", "fingerprint": "f",
             "samples": [{"image": "a.png", "latent": "a", "shape": [8, 8], "caption": "a"}]}


def skip_old_vue(server: Server, renderer: str) -> None:
    if renderer == "vue" and not server.install.at_least(0, 20):
        pytest.skip("Nodes 2.0 is not finished in this frontend")


def demo(page: Canvas, run: str, steps: int) -> str:
    """Load the demo graph under this run name; returns the id of its first Train Steps, whose steps are set."""
    workflow = json.loads(DEMO.read_text(encoding="utf-8"))
    start = next(n for n in workflow["nodes"] if n["type"] == "FluxFFTStart")
    train = min((n for n in workflow["nodes"] if n["type"] == "FluxFFTTrainSteps"), key=lambda n: n["pos"][0])
    start["widgets_values"][0], train["widgets_values"][0] = run, steps
    page.load(workflow)
    return str(train["id"])


def with_previews(page: Canvas, every: int) -> None:
    """Have pictures made every so many steps; 0: none."""
    page.page.evaluate("""(every) => {
      const settings = window.app.canvas.graph.nodes.find((n) => n.type === 'FluxFFTPreviewSettings')
      settings.widgets.find((w) => w.name === 'every_n_steps').value = every
    }""", every)


def wait_idle(server: Server, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while True:
        queue = server.get("/queue")
        if not queue["queue_running"] and not queue["queue_pending"]:
            return
        assert time.monotonic() < end, f"the prompt did not end\n{server.tail(30)}"
        time.sleep(0.1)


def stop(server: Server, run: str) -> None:
    server.post(f"/flux_fft/runs/{run}/stop", {})
    wait_idle(server)


def event(page: Canvas, run: str, kind: str, seconds: float = 60.0) -> dict[str, Any]:
    """The newest event of a kind, once there is one."""
    for _ in range(int(seconds * 10)):
        found = [e for e in page.server.events(run) if e["type"] == kind]
        if found:
            return found[-1]
        page.page.wait_for_timeout(100)
    raise AssertionError(f"run {run} has no event {kind}")


def step_of(read: dict[str, Any]) -> int:
    """The step that a panel shows."""
    return int(read["step"].split("/")[0].strip().replace(",", ""))


def long_run(server: Server, name: str, steps: int) -> None:
    """The directory of a run that has trained so many steps, with losses at fixed noise, and was stopped."""
    config = RunConfig(name=name, model=ModelConfig(flux="f.safetensors"), dataset=DatasetConfig(folder="d"))
    run = RunDirectory.create(server.home / name, config, _MANIFEST)
    n = run.events()[-1]["n"]
    lines = []
    for step in range(1, steps + 1):
        loss = round(0.5 + math.exp(-step / 900) + 0.1 * math.sin(7 * step), 6)
        lines.append({"type": "step", "step": step, "loss": loss, "lr": 1e-5, "seconds": 1.0})
        if step % 500 == 0:
            lines.append({"type": "validated", "step": step, "loss": round(0.6 + math.exp(-step / 900), 6)})
    with open(run.path / "events.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"n": n + i, "t": 1.8e9 + i, **line}) + "\n" for i, line in enumerate(lines, 1))
    for state in ("preparing", "stopped"):
        run.transition(state)

"""What the panel costs: processor seconds of the ComfyUI process while it trains with a panel open, by training time.

A real ComfyUI (``COMFYUI_PATH``) trains the demo while a browser's part is played by a websocket that takes all events.
The same is asked of the pusher alone, in this process, on a copy of that run. The demo's
steps are a hundred times shorter than FLUX.1's, so the last lines scale by what a step of ``--step-seconds`` costs.

    python -m benchmarks.panel --json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from trainer.run import RunDirectory

log = logging.getLogger(__name__)
WARM_UP = 20
"""Steps before the measurement."""
LOOKS = 200


def measure(seconds: float) -> dict[str, Any]:
    """Train for ``seconds`` with a listener; what that took."""
    from tests.comfyui.graphs import demo, train
    from tests.comfyui.server import Graph, Server, find_installs

    installs, looked_at = find_installs()
    if not installs:
        raise SystemExit(f"no ComfyUI at {looked_at}: set COMFYUI_PATH")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(installs[0], Path(folder))
        try:
            graph = Graph()
            train(graph, demo(graph), "panel", 1_000_000)
            server.post("/prompt", {"prompt": graph, "client_id": server.client_id})
            events = _Listener(server)
            while len(_steps(server)) < WARM_UP:
                time.sleep(0.2)
            process = psutil.Process(server.process.pid)
            before, started, first = sum(process.cpu_times()[:2]), time.monotonic(), len(_steps(server))
            events.count = 0
            while time.monotonic() - started < seconds:
                time.sleep(1.0)
            spent, took = sum(process.cpu_times()[:2]) - before, time.monotonic() - started
            steps = len(_steps(server)) - first
            server.post("/flux_fft/runs/panel/stop", {})
            return {"comfyui": installs[0].version, "seconds": took, "steps": steps,
                    "step_seconds": took / max(steps, 1), "events": events.count,
                    "server_cpu_seconds": spent, "server_cpu_share": spent / took, **look_cost(server.home / "panel")}
        finally:
            server.stop()


def look_cost(run_dir: Path) -> dict[str, float]:
    """Processor seconds of one look of the pusher: at a run that has made a step, and at one that has not."""
    from tests.unit.test_follow import _load as load_module

    run, follower = RunDirectory(run_dir), load_module("follow").Follower(run_dir)
    follower.begin()
    begin = time.process_time()
    for _ in range(LOOKS):
        follower.pulse()
    idle = (time.process_time() - begin) / LOOKS
    news = 0.0
    last = run.status()["step"]
    for step in range(last + 1, last + 1 + LOOKS):
        run.append("step", step=step, loss=0.5, lr=1e-6, seconds=1.0)
        begin = time.process_time()
        json.dumps(follower.news())
        news += time.process_time() - begin
    return {"look_idle_seconds": idle, "look_news_seconds": news / LOOKS}


def _steps(server: Any) -> list[int]:
    return server.steps("panel") if (server.home / "panel" / "events.jsonl").exists() else []


class _Listener:
    """Reads the server's websocket, as an open page does."""

    def __init__(self, server: Any) -> None:
        self.count = 0
        self._socket = server.socket
        self._socket.settimeout(None)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message = self._socket.recv()
            except Exception:  # the server has ended
                return
            self.count += isinstance(message, str) and "flux_fft.event" in message


def main(argv: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train (60)")
    parser.add_argument("--step-seconds", type=float, default=10.0, help="a real step's length, to scale to (10)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = measure(options.seconds)
    # The pusher looks twice a second; one of those looks finds the step.
    looks = 2 * options.step_seconds
    cost = found["look_news_seconds"] + (looks - 1) * found["look_idle_seconds"]
    found |= {"pusher_share_of_step": cost / options.step_seconds}
    for name, value in found.items():
        log.info("%-22s %s", name, f"{value:.6g}" if isinstance(value, float) else value)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

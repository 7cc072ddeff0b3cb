"""A real ComfyUI server for tests: found, started in a folder of its own, spoken to as a browser does.

Nothing is written into the ComfyUI checkout: ``--base-directory`` moves models, custom_nodes, input, output, temp and
user into a temporary folder, where the pack is linked. Both 0.3.64 and 0.33.0 know that option.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import websocket

PACK = Path(__file__).resolve().parents[2]
PACK_NAME = "flux-full-fine-tune"
BOOT_SECONDS = 240.0
"""A cold start on a slow disk, shared with other work, takes a minute."""


@dataclass(frozen=True)
class Install:
    """A ComfyUI checkout and the interpreter it runs under."""

    path: Path
    python: Path

    @property
    def version(self) -> str:
        text = (self.path / "comfyui_version.py").read_text(encoding="utf-8")
        return text.split('__version__ = "')[1].split('"')[0]

    def at_least(self, *version: int) -> bool:
        return tuple(int(v) for v in self.version.split(".")) >= version


def find_installs() -> tuple[list[Install], str]:
    """The installs to test, and where was looked.

    ``COMFYUI_PATH`` (several separated as in PATH), else ``~/comfy/ComfyUI``; the interpreter is ``COMFYUI_PY``, else
    ``venv/bin/python`` inside the checkout.
    """
    chosen = [p for p in os.environ.get("COMFYUI_PATH", "").split(os.pathsep) if p]
    paths = [Path(p).expanduser() for p in chosen] or [Path("~/comfy/ComfyUI").expanduser()]
    found = []
    for path in paths:
        inside = path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        python = Path(os.environ.get("COMFYUI_PY") or inside)
        if (path / "main.py").is_file() and python.exists():
            found.append(Install(path.resolve(), python))
        elif chosen:
            raise FileNotFoundError(f"COMFYUI_PATH names {path}, but there is no main.py or no interpreter {python}")
    return found, ", ".join(map(str, paths))


@dataclass
class Result:
    """What came of one prompt."""

    executed: list[str] = field(default_factory=list)
    """Ids of the nodes that ran (cached ones are left out)."""
    outputs: dict[str, Any] = field(default_factory=dict)
    """What each node told the canvas, by node id."""
    error: str = ""
    """The message of the node that failed; empty: none did."""
    error_node: str = ""
    interrupted: bool = False
    seconds: float = 0.0

    def text(self, node: str) -> str:
        return "\n".join(self.outputs[node]["text"])


class Rejected(Exception):
    """The server refused the prompt; ``errors`` as it sent them."""

    def __init__(self, errors: dict[str, Any]) -> None:
        super().__init__(json.dumps(errors)[:2000])
        self.errors = errors


class Server:
    """One running ComfyUI."""

    def __init__(self, install: Install, base: Path, env: dict[str, str] | None = None) -> None:
        self.install, self.base = install, base
        self.log = base / "server.log"
        self.port = _free_port()
        self.client_id = uuid.uuid4().hex
        kinds = ("diffusion_models", "text_encoders", "vae", "checkpoints", "loras")
        for folder in ("custom_nodes", "input", "output", "temp", "user", *(f"models/{kind}" for kind in kinds)):
            (base / folder).mkdir(parents=True, exist_ok=True)
        _link(PACK, base / "custom_nodes" / PACK_NAME)
        command = [str(install.python), "-u", str(install.path / "main.py"), "--cpu", "--listen", "127.0.0.1",
                   "--port", str(self.port), "--base-directory", str(base), "--disable-auto-launch",
                   "--disable-api-nodes", "--database-url", f"sqlite:///{base / 'user' / 'comfyui.db'}"]
        whole = {k: v for k, v in os.environ.items() if k not in ("FLUX_FFT_HOME", "PYTHONPATH")}
        whole |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, cwd=base, stdout=log, stderr=subprocess.STDOUT, env=whole)
        try:
            self._await_boot()
            address = f"ws://127.0.0.1:{self.port}/ws?clientId={self.client_id}"
            self.socket = websocket.create_connection(address, timeout=60)
        except BaseException:
            self.stop()
            raise

    def _await_boot(self) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended while starting:\n{self.tail()}")
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"ComfyUI did not answer within {BOOT_SECONDS:.0f} s:\n{self.tail()}")

    def stop(self) -> None:
        """End the server as closing its window does."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    # -- HTTP

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, data: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(data).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise Rejected(json.load(error)) from None
        return json.loads(text) if text else {}

    def forget(self) -> None:
        """Have ComfyUI drop its cache, as a restart would: it goes by what a node is given, not by its id."""
        self.post("/free", {"unload_models": True, "free_memory": True})
        # The executor does that after the prompt that follows at the latest.
        g = Graph()
        g.add("PreviewImage", images=g.add("EmptyImage", width=16, height=16, batch_size=1, color=0))
        self.run(g)

    def interrupt(self) -> None:
        self.post("/interrupt", {})

    # -- prompts

    def run(self, graph: dict[str, Any], *, seconds: float = 120.0,
            on_message: Callable[[dict[str, Any]], None] | None = None) -> Result:
        """Queue a graph in API format and wait until it has ended. ``on_message`` sees the websocket's messages."""
        started = time.monotonic()
        prompt = self.post("/prompt", {"prompt": graph, "client_id": self.client_id})["prompt_id"]
        result = Result()
        while True:
            left = started + seconds - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the prompt did not end within {seconds:.0f} s:\n{self.tail()}")
            self.socket.settimeout(min(left, 5.0))
            try:
                raw = self.socket.recv()
            except websocket.WebSocketTimeoutException:
                if self.process.poll() is not None:
                    raise RuntimeError(f"ComfyUI ended:\n{self.tail()}") from None
                continue
            if not isinstance(raw, str):
                continue
            message = json.loads(raw)
            if on_message is not None:
                on_message(message)
            data = message.get("data") or {}
            if data.get("prompt_id") not in (None, prompt):
                continue
            kind = message["type"]
            if kind == "executing" and data.get("prompt_id") == prompt:
                if data["node"] is None:
                    break
                result.executed.append(data["node"])
            elif kind == "execution_error":
                result.error = data["exception_message"].strip()
                result.error_node = data["node_id"]
                break
            elif kind == "execution_interrupted":
                result.interrupted = True
                break
        result.seconds = time.monotonic() - started
        result.outputs = self._history(prompt)
        return result

    def _history(self, prompt: str) -> dict[str, Any]:
        # The entry is written a moment after the last message.
        for _ in range(100):
            history = self.get(f"/history/{prompt}")
            if prompt in history:
                return history[prompt]["outputs"]
            time.sleep(0.05)
        raise TimeoutError("the prompt did not come into the history")

    # -- the pack

    @property
    def home(self) -> Path:
        return self.base / "output" / "flux_fft"

    def status(self, name: str) -> dict[str, Any]:
        """The run from its disk, by the pack's own command line."""
        command = [sys.executable, str(PACK / "trainer" / "__main__.py"), "status", str(self.home / name), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.home / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def steps(self, name: str) -> list[int]:
        """The step numbers that were trained, in order."""
        return [e["step"] for e in self.events(name) if e["type"] == "step"]


class Graph(dict):
    """A graph in API format, built node by node: ``g.add("FluxFFTStart", model=link)`` gives the id."""

    def add(self, kind: str, **inputs: Any) -> Node:
        key = str(len(self) + 1)
        links = {name: value.out(0) if isinstance(value, Node) else value for name, value in inputs.items()}
        self[key] = {"class_type": kind, "inputs": links}
        return Node(key)


class Node(str):
    """A node's id in a graph."""

    def out(self, index: int) -> list[Any]:
        """The link from one of its outputs."""
        return [str(self), index]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _link(source: Path, target: Path) -> None:
    if target.exists():  # a server that was there before
        return
    try:
        os.symlink(source, target, target_is_directory=True)
    except OSError:  # Windows without the right to make links
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(".git", "tests", "__pycache__"))

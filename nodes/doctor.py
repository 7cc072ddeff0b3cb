"""Does the engine work on this machine, and how fast is it?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from comfy_api.latest import io

from . import bridge, handles

_MAIN = Path(__file__).resolve().parent.parent / "trainer" / "__main__.py"
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_DEVICES = ["auto", "cpu", "cuda", *(f"cuda:{n}" for n in range(8))]


class FluxFFTDoctor(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTDoctor",
            display_name="Doctor",
            category=handles.CATEGORY,
            description="Checks that training works on this machine and measures how fast it is: copies, arithmetic, "
                        "memory, disk. Takes a few minutes at most. The plan uses what it finds, and a bug report "
                        "should hold what it says.",
            inputs=[
                io.Combo.Input("device", options=_DEVICES, default="auto",
                               tooltip="auto: the first GPU, or the CPU where there is none. Choose the device that "
                                       "you train on."),
                io.Int.Input("examination", default=1, min=1, max=1_000_000,
                             tooltip="Raise it by one to have the machine examined again, after a driver update "
                                     "for example."),
            ],
            outputs=[io.String.Output("report", display_name="report")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, device, examination) -> io.NodeOutput:
        bridge.unload_models()
        text = examine(device)
        return io.NodeOutput(text, ui={"text": (text,)})


def examine(device: str) -> str:
    """The doctor's text, from a process of its own: as a worker has it, without ComfyUI's allocator and models."""
    command = [sys.executable, str(_MAIN), "doctor", "--json", "--device", device, "--folder", str(bridge.home())]
    environment = {k: v for k, v in os.environ.items() if k not in _ALLOCATOR} | {"PYTHONUTF8": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
                                   cwd=tempfile.gettempdir())
        try:
            while True:
                try:
                    process.wait(0.2)
                    break
                except subprocess.TimeoutExpired:
                    bridge.throw_if_cancelled()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        for file in (out, err):
            file.seek(0)
        told, words = out.read().strip(), err.read().strip()
    if process.returncode == 2:
        raise ValueError(words.splitlines()[-1] if words else "the doctor could not be asked")
    try:
        return json.loads(told.splitlines()[-1])["text"]
    except (IndexError, ValueError, KeyError):
        last = words.splitlines()[-1] if words else f"exit code {process.returncode}"
        raise RuntimeError(f"the doctor died: {last}") from None

"""Where things live while training."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer.config import MemoryConfig
from . import handles

_DEVICES = ["auto", "cpu", "cuda", *(f"cuda:{n}" for n in range(8))]


class FluxFFTMemory(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTMemory",
            display_name="Memory and Device",
            category=handles.CATEGORY,
            description="Where the training runs and what waits in RAM. Without this node everything is decided "
                        "automatically.",
            inputs=[
                io.Combo.Input("device", options=_DEVICES, default="auto",
                               tooltip="auto: the first GPU, or the CPU where there is none. Choose cuda:1 and so "
                                       "on to train on another GPU."),
                io.Int.Input("blocks_to_swap", default=-1, min=-1, max=1000,
                             tooltip="How many of the model's blocks (57 in FLUX.1) wait in RAM between uses; -1: "
                                     "as few as fit. Raise it when the GPU runs out of memory."),
                io.Combo.Input("activation_offload", options=["auto", "on", "off"], default="auto",
                               tooltip="Keep the blocks' inputs in RAM during a step. Turn it on when the GPU runs "
                                       "out of memory at a large batch or resolution."),
                io.Int.Input("micro_batch", default=0, min=0, max=1024,
                             tooltip="Pictures that pass a block at once; 0: the whole batch. Set 1 or 2 when the "
                                     "GPU runs out of memory: the result is the same, somewhat slower."),
                io.Float.Input("reserve_vram_gb", default=1.0, min=0.0, max=1024.0, step=0.25,
                               tooltip="GiB of GPU memory to leave free for the desktop and other programs. "
                               "Raise it when the screen stutters while training."),
            ],
            outputs=[handles.Memory.Output("memory", display_name="memory")],
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(MemoryConfig(**settings))

"""The weights in training as an ordinary MODEL."""

from __future__ import annotations

from comfy_api.latest import io

from . import handles, pictures, registry


class FluxFFTRunModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTRunModel",
            display_name="Run as MODEL",
            category=handles.CATEGORY,
            description="The weights in training as a MODEL for ComfyUI's own samplers, without a copy of them. It "
                        "stands for the run at one step: connect what you sample to 'after' of the next Train "
                        "Steps. LoRAs, ControlNets and attention patches do not work on it.",
            inputs=[
                handles.Run.Input("run", tooltip="The run to sample, from Train Steps, Start or Open a Run."),
                io.Boolean.Input("average", default=False, optional=True,
                                 tooltip="The running average of the weights, which Training Recipe's ema_decay keeps. "
                                         "Turn it on to see what an export of the average would give."),
            ],
            outputs=[io.Model.Output("model", display_name="MODEL")],
        )

    @classmethod
    def execute(cls, run, average=False) -> io.NodeOutput:
        directory = registry.open_directory(run)
        if average:
            pictures.require_average(directory, run.saved)
        return io.NodeOutput(pictures.proxy(run, directory, average=bool(average)))

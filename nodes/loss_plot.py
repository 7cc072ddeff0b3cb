"""The loss curve as a picture."""

from __future__ import annotations

from comfy_api.latest import io

from . import bridge, handles, pictures, registry


class FluxFFTLossPlot(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTLossPlot",
            display_name="Loss Plot",
            category=handles.CATEGORY,
            description="Draws the loss of each step of the run. The loss of Flux jumps with the noise level of each step: "
            "look at the smoothed line.",
            inputs=[
                handles.Run.Input("run", tooltip="The run, from Train Steps, Start or Open a Run."),
                io.Float.Input("smoothing", default=0.9, min=0.0, max=0.999, step=0.001,
                               tooltip="Share of the line that is carried from step to step, 0 to 1. Raise it when the line jumps too "
                               "much; 0: not smoothed."),
            ],
            outputs=[handles.Run.Output("run_out", display_name="run"), io.Image.Output("image", display_name="image")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, run, smoothing) -> io.NodeOutput:
        directory = registry.open_directory(run)
        points = [(step, loss) for step, loss in directory.losses() if step <= run.step]
        if not points:
            raise ValueError(f"run {run.name!r} has no steps yet: connect Loss Plot after Train Steps")
        path = pictures.plot(directory, points, smoothing)
        text = f"Run {run.name!r}: loss {points[0][1]:.4f} at step {points[0][0]}, {points[-1][1]:.4f} at step {points[-1][0]}"
        return io.NodeOutput(run, pictures.as_images([path]), ui={"text": (text,), "images": [bridge.ui_image(path)]})

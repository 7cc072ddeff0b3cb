"""The loss curve as a picture."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer import plot
from . import bridge, handles, pictures, registry


class FluxFFTLossPlot(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTLossPlot",
            display_name="Loss Plot",
            category=handles.CATEGORY,
            description="Draws the loss of each step of the run. The loss of Flux jumps with the noise level of "
                        "each step: look at the smoothed line.",
            inputs=[
                handles.Run.Input("run", tooltip="The run, from Train Steps, Start or Open a Run."),
                io.Float.Input("smoothing", default=0.9, min=0.0, max=0.999, step=0.001,
                               tooltip="Share of the line that is carried from step to step, 0 to 1. Raise it when "
                                       "the line jumps too much; 0: not smoothed."),
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
        evals = [(step, loss) for step, loss in directory.evals() if step <= run.step]
        drawn = plot.draw_losses(points, smoothing=smoothing, evals=evals, title=run.name)
        path = plot.save_png(drawn, directory.path / "plots" / f"loss-{run.step:06d}.png")
        (first, loss_first), (last, loss_last) = points[0], points[-1]
        text = f"Run {run.name!r}: loss {loss_first:.4f} at step {first}, {loss_last:.4f} at step {last}"
        return io.NodeOutput(run, pictures.as_images([path]), ui={"text": (text,), "images": [bridge.ui_image(path)]})

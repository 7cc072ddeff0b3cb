"""The demo on the canvas: a tiny Flux and 16 drawings, trained on any machine in a few minutes."""

from __future__ import annotations

from comfy_api.latest import io

from . import bridge, demo_parts, handles


class FluxFFTDemo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTDemo",
            display_name="Demo: Tiny Flux and 16 Drawings",
            category=handles.CATEGORY,
            description="A Flux of a millionth of the real size, its own VAE and text encoder, and 16 captioned "
                        "drawings of shapes: everything to try a training on any machine, on the CPU too. Its files "
                        "are written below output/flux_fft/demo.",
            inputs=[],
            outputs=[
                handles.Model.Output("model", display_name="model"),
                handles.Dataset.Output("dataset", display_name="dataset"),
                handles.Optimizer.Output("optimizer", display_name="optimizer"),
                handles.Recipe.Output("recipe", display_name="recipe"),
                io.Clip.Output("clip", display_name="CLIP"),
                io.Vae.Output("vae", display_name="VAE"),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        demo = demo_parts.make(bridge.home() / "demo")
        return io.NodeOutput(demo.model, demo.dataset, demo.optimizer, demo.recipe, demo.clip, demo.vae,
                             ui={"text": (f"The demo's files are in {bridge.home() / 'demo'}",)})

"""A LoRA that is merged into the Flux before it is trained."""

from __future__ import annotations

import dataclasses

from comfy_api.latest import io

from ..trainer.config import LoraConfig
from ..trainer.flux.lora import read_lora
from ..trainer.flux.variants import require_flux
from . import bridge, bridge_files, handles


class FluxFFTMergeLoRA(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTMergeLoRA",
            display_name="Merge LoRA before Training",
            category=handles.CATEGORY,
            description="Adds a LoRA to the weights of the Flux that a new run begins with. Several of these in a row "
            "add several. The files are only read.",
            inputs=[
                handles.Model.Input("model", tooltip="The Flux, from Flux Model to Train, or from another Merge LoRA."),
                io.Combo.Input("lora", options=bridge_files.lora_files(),
                               tooltip="LoRA file from models/loras, made for FLUX.1: of kohya, diffusers, ComfyUI, "
                                       "OneTrainer, SimpleTuner or XLabs; LoHa and LoKr too. What it changes in text "
                                       "encoders is left out."),
                io.Float.Input("strength", default=1.0, min=-100.0, max=100.0, step=0.01,
                               tooltip="How much of the LoRA is added, as in ComfyUI's own LoRA loader. Negative takes "
                                       "it away; 0 leaves it out."),
            ],
            outputs=[handles.Model.Output("merged", display_name="model")],
        )

    @classmethod
    def execute(cls, model, lora, strength) -> io.NodeOutput:
        path = bridge.model_path("lora", lora, "loras")
        added = LoraConfig(path=path, strength=float(strength))
        flux = require_flux(model.config.flux).flux
        assert flux is not None
        read_lora(path, flux)
        config = dataclasses.replace(model.config, loras=(*model.config.loras, added))
        return io.NodeOutput(dataclasses.replace(model, config=config))

"""Which Flux is trained, and which encoders make its data."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer.config import ModelConfig
from ..trainer.flux.variants import require_flux
from . import bridge, bridge_files, encoders, handles

FROM_LINK = "from the link"


class FluxFFTModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        texts = [FROM_LINK, *bridge.model_files("text_encoders")]
        return io.Schema(
            node_id="FluxFFTModel",
            display_name="Flux Model to Train",
            category=handles.CATEGORY,
            description="The files of the Flux to train: its weights, its two text encoders and its VAE. "
            "They are read from disk when needed and never changed.",
            inputs=[
                io.Combo.Input("flux", options=bridge_files.flux_files(),
                               tooltip="File of the Flux weights, bf16, f16 or f32, from models/diffusion_models or "
                                       "models/checkpoints, or a folder of models/diffusers. Choose dev, Krea, schnell "
                                       "or a model made from one; of several parts choose any. fp8, nf4 and GGUF files "
                                       "cannot be trained."),
                io.Combo.Input("clip_l", options=texts,
                               tooltip="File of the CLIP-L text encoder (clip_l.safetensors). "
                               f"Choose '{FROM_LINK}' when clip_override is connected."),
                io.Combo.Input("t5", options=texts,
                               tooltip="File of the T5-XXL text encoder (t5xxl_fp16.safetensors). "
                               f"Choose '{FROM_LINK}' when clip_override is connected."),
                io.Combo.Input("vae", options=[FROM_LINK, *bridge.model_files("vae")],
                               tooltip="File of the Flux VAE (ae.safetensors). "
                               f"Choose '{FROM_LINK}' when vae_override is connected."),
                io.Clip.Input("clip_override", optional=True,
                              tooltip="A loaded CLIP to encode captions and prompts with, in place of the two files. "
                              "Connect one when the text encoders come from an all-in-one checkpoint."),
                io.Vae.Input("vae_override", optional=True,
                             tooltip="A loaded VAE in place of the file. "
                             "Connect one when the VAE comes from an all-in-one checkpoint."),
            ],
            outputs=[handles.Model.Output("model", display_name="model")],
        )

    @classmethod
    def execute(cls, flux, clip_l, t5, vae, clip_override=None, vae_override=None) -> io.NodeOutput:
        path = bridge_files.flux_path(flux)
        require_flux(path)
        clip_l, t5 = (_encoder(name, value, clip_override) for name, value in (("clip_l", clip_l), ("t5", t5)))
        vae_file = ""
        if vae != FROM_LINK:
            vae_file = bridge.model_path("vae", vae, "vae")
        elif vae_override is None:
            raise ValueError(f"vae is '{FROM_LINK}', but vae_override is not connected: choose a file or connect a VAE")
        config = ModelConfig(flux=path, clip_l=clip_l, t5=t5, vae="" if vae_override is not None else vae_file)
        encoders.check_files(config)
        return io.NodeOutput(handles.ModelHandle(
            config=config, clip_key=bridge.keep(clip_override), vae_key=bridge.keep(vae_override)))


def _encoder(name: str, value: str, override: object) -> str:
    if override is not None:
        return ""
    if value != FROM_LINK:
        return bridge.model_path(name, value, "text_encoders")
    return ""

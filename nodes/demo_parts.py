"""The demo's VAE and caption encoder as ComfyUI sees a VAE and a CLIP.

They answer what ComfyUI's own CLIPTextEncode, VAEDecode and VAEEncode ask, tiled variants included. They are small
enough to live on the CPU, so ComfyUI's memory management has nothing to do with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trainer import demo_data
from ..trainer.config import DatasetConfig, OptimizerConfig, RecipeConfig
from ..trainer.flux.variants import fingerprint
from ..trainer.header import read_header
from .handles import ModelHandle

if TYPE_CHECKING:
    from torch import Tensor

VAE, CAPTIONS = demo_data.VAE_KIND, demo_data.CAPTIONS_KIND


def kind_of(path: str) -> str:
    """What the demo calls a file (``VAE``, ``CAPTIONS``), or "" for any other."""
    try:
        return read_header(path).metadata.get("flux_fft", "")
    except (OSError, ValueError):
        return ""


class DemoClip:
    """The demo's caption encoder as a CLIP."""

    def __init__(self, path: str) -> None:
        self.flux_fft_id = fingerprint(path)
        self._encoder = demo_data.CaptionEncoder.load(path)

    def clone(self) -> DemoClip:
        return self

    def tokenize(self, text: str, return_word_ids: bool = False, **_: Any) -> dict[str, Any]:
        # ComfyUI's own tokenizers read "\(" as a bracket.
        return {"words": text.replace("\\(", "(").replace("\\)", ")")}

    @property
    def token_length(self) -> int:
        """Words of a text that are read."""
        return self._encoder.token_length

    def count_tokens(self, text: str) -> int:
        """Words of a text."""
        return len(self._encoder.words(text))

    def encode_from_tokens(self, tokens: dict[str, Any], return_pooled: bool = False, return_dict: bool = False) -> Any:
        context, pooled = self._encoder.encode([tokens["words"]])
        if return_dict:
            return {"cond": context, "pooled_output": pooled}
        return (context, pooled) if return_pooled else context

    def encode_from_tokens_scheduled(self, tokens: dict[str, Any], unprojected: bool = False,
                                     add_dict: dict[str, Any] | None = None, show_pbar: bool = True) -> list[Any]:
        found = self.encode_from_tokens(tokens, return_dict=True)
        return [[found.pop("cond"), {**found, **(add_dict or {})}]]


class DemoVae:
    """The demo's linear VAE as a VAE."""

    latent_channels = 16
    latent_dim = 2
    downscale_ratio = upscale_ratio = demo_data.BLOCK

    def __init__(self, path: str) -> None:
        self.flux_fft_id = fingerprint(path)
        self.first_stage_model = demo_data.LinearVAE.load(path)

    def throw_exception_if_invalid(self) -> None:
        pass

    def decode(self, samples: Tensor, vae_options: dict[str, Any] | None = None) -> Tensor:
        return self.first_stage_model.decode(samples.cpu())

    def encode(self, pixels: Tensor) -> Tensor:
        height, width = (side - side % demo_data.BLOCK for side in pixels.shape[1:3])
        return self.first_stage_model.encode(pixels[:, :height, :width, :3].cpu())

    def decode_tiled(self, samples: Tensor, **_: Any) -> Tensor:
        return self.decode(samples)

    def encode_tiled(self, pixels: Tensor, **_: Any) -> Tensor:
        return self.encode(pixels)

    def spacial_compression_decode(self) -> int:
        return demo_data.BLOCK

    def spacial_compression_encode(self) -> int:
        return demo_data.BLOCK

    def temporal_compression_decode(self) -> None:
        return None


@dataclass(frozen=True)
class Demo:
    """What the demo node gives."""

    model: ModelHandle
    dataset: DatasetConfig
    optimizer: OptimizerConfig
    recipe: RecipeConfig
    clip: DemoClip
    vae: DemoVae


def make(folder: Path) -> Demo:
    """Write the demo's files into ``folder`` (those there are left) and describe a training of them."""
    paths = demo_data.write_demo(folder)
    settings = demo_data.settings(paths)
    return Demo(model=ModelHandle(config=settings["model"]), dataset=settings["dataset"],
                optimizer=settings["optimizer"], recipe=settings["recipe"],
                clip=DemoClip(str(paths["captions"])), vae=DemoVae(str(paths["vae"])))

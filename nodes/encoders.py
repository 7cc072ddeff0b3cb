"""Captions, prompts and pictures into what the worker trains on, and latents back into pictures.

The encoders are loaded when something must be encoded and let go after; encoded texts stay on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..trainer.data.cache import Cache, caption_key
from ..trainer.flux.variants import fingerprint, require_flux, text_length
from . import bridge, demo_parts
from .handles import ModelHandle

if TYPE_CHECKING:
    from torch import Tensor


class Encoders:
    """The text encoders and the VAE of a model handle. ``with`` it: on leaving, what was loaded is dropped."""

    def __init__(self, model: ModelHandle) -> None:
        self.model = model
        self.cache = Cache(bridge.home() / "cache")
        self.token_length = text_length(require_flux(model.config.flux))
        self._clip: Any = None
        self._vae: Any = None

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        loaded = self._clip is not None or self._vae is not None
        self._clip = self._vae = None
        if loaded:
            bridge.let_go()

    @property
    def text_id(self) -> str:
        """Tells these text encoders from others."""
        files = self._text_files()
        if not files:
            return bridge.content_id(self._linked("clip"))
        return "+".join(fingerprint(f) for f in files)

    @property
    def vae_id(self) -> str:
        """Tells this VAE from others."""
        if not self.model.config.vae:
            return bridge.content_id(self._linked("vae"))
        return fingerprint(self.model.config.vae)

    def _text_files(self) -> list[str]:
        """The files that are used: both encoders, or the demo's one. Empty: a linked CLIP."""
        config = self.model.config
        if self.model.clip_key:
            return []
        given = [f for f in (config.clip_l, config.t5) if f]
        demo = [f for f in given if demo_parts.kind_of(f) == demo_parts.CAPTIONS]
        if demo:
            return demo[:1]
        for name, path in (("clip_l", config.clip_l), ("t5", config.t5)):
            if not path:
                raise ValueError(f"{name} is not chosen: choose the file of this text encoder in Flux Model to Train, "
                                 "or connect a CLIP there")
        return given

    def _linked(self, what: str) -> Any:
        key = self.model.clip_key if what == "clip" else self.model.vae_key
        if not key:
            raise ValueError(f"{what} is not chosen: choose its file in Flux Model to Train, or connect one there")
        return bridge.kept(key, what.upper())

    def clip(self) -> Any:
        if self._clip is None:
            files = self._text_files()
            if not files:
                self._clip = self._linked("clip")
            elif len(files) == 1:
                self._clip = demo_parts.DemoClip(files[0])
            else:
                self._clip = bridge.load_clip(*files)
        return self._clip

    def vae(self) -> Any:
        if self._vae is None:
            path = self.model.config.vae
            if not path:
                self._vae = self._linked("vae")
            elif demo_parts.kind_of(path) == demo_parts.VAE:
                self._vae = demo_parts.DemoVae(path)
            else:
                self._vae = bridge.load_vae(path)
        return self._vae

    def encode_captions(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(context [B, T, D], pooled [B, P]) of texts."""
        import torch

        pairs = []
        for text in texts:
            bridge.throw_if_cancelled()
            pairs.append(bridge.encode_text(self.clip(), text, self.token_length))
        return torch.stack([c for c, _ in pairs]), torch.stack([p for _, p in pairs])

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Model-space latents [B, 16, h, w] of pictures [B, H, W, 3] in 0..1."""
        bridge.throw_if_cancelled()
        return bridge.encode_pixels(self.vae(), pixels)

    def decode(self, latent: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] in 0..1 of latents in the VAE's own space."""
        return self.vae().decode(latent).float().cpu().clamp(0, 1)

    def prompts(self, texts: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """(context [T, D], pooled [P]) of each text, from the cache where it is there."""
        found, text_id = [], self.text_id
        for text in texts:
            key = caption_key(text, text_id, self.token_length)
            pair = self.cache.read("captions", key)
            if pair is None:
                context, pooled = self.encode_captions([text])
                self.cache.write("captions", key, context[0], pooled[0])
                pair = (context[0], pooled[0])
            found.append(pair)
        return found

"""Captions, prompts and pictures into what the worker trains on, and latents back into pictures.

The encoders are loaded when something must be encoded and let go after; encoded texts stay on disk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..trainer.config import ModelConfig
from ..trainer.data.cache import Cache, caption_key
from ..trainer.data.captions import cut_off
from ..trainer.flux.variants import FileInfo, fingerprint, require_flux, text_length
from ..trainer.header import TensorInfo, read_header
from . import bridge, bridge_text, demo_parts
from .handles import ModelHandle

if TYPE_CHECKING:
    from torch import Tensor


CLIP_L = ("text_model.encoder.layers.11.mlp.fc1.weight", (3072, 768))
T5_XXL = ("encoder.block.23.layer.0.SelfAttention.k.weight", (4096, 4096))
FLUX_VAE = ("decoder.conv_in.weight", (512, 16, 3, 3))
"""A tensor that tells each file from others: ComfyUI would load many, and encode nonsense or fail in many lines."""


def check_text_files(clip_l: str, t5: str) -> None:
    """Raise ``ValueError`` unless one file is a CLIP-L and the other a T5-XXL, in either order."""
    tables = [_tensors("clip_l", clip_l), _tensors("t5", t5)]
    for name, path, called, kind in (("clip_l", clip_l, "CLIP-L", CLIP_L), ("t5", t5, "T5-XXL", T5_XXL)):
        if not any(_is(kind, tensors) for tensors in tables):
            raise ValueError(f"{name} is {path}: this is no {called} text encoder, choose another file")


def check_vae_file(path: str) -> None:
    """Raise ``ValueError`` unless the file is a VAE of Flux's kind, with latents of 16 channels."""
    if not _is(FLUX_VAE, _tensors("vae", path)):
        raise ValueError(f"vae is {path}: this is no VAE for FLUX.1, choose another file (ae.safetensors)")


def check_files(config: ModelConfig) -> None:
    """Raise ``ValueError`` unless the encoders' files that are chosen are such files, the demo's or others."""
    texts = [path for path in (config.clip_l, config.t5) if path]
    if len(texts) == 2 and not any(demo_parts.kind_of(path) == demo_parts.CAPTIONS for path in texts):
        check_text_files(*texts)
    if config.vae and demo_parts.kind_of(config.vae) != demo_parts.VAE:
        check_vae_file(config.vae)


def _tensors(name: str, path: str) -> dict[str, TensorInfo]:
    try:
        return read_header(path).tensors
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is {path}: choose another file ({error})") from None


def _is(kind: tuple[str, tuple[int, ...]], tensors: dict[str, TensorInfo]) -> bool:
    return kind[0] in tensors and tensors[kind[0]].shape == kind[1]


class Encoders:
    """The text encoders and the VAE of a model handle. ``with`` it: on leaving, what was loaded is dropped.

    ``info``: what its Flux is, where that is known; else its file is looked at.
    """

    def __init__(self, model: ModelHandle, info: FileInfo | None = None) -> None:
        check_files(model.config)
        self.model = model
        self.cache = Cache(bridge.home() / "cache")
        self.info = info or require_flux(model.config.flux)
        self.token_length = text_length(self.info)
        self._clip: Any = None
        self._vae: Any = None

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Let go of what was loaded; it is loaded again when it is needed."""
        loaded = self._clip is not None or self._vae is not None
        self._clip = self._vae = None
        if loaded:
            bridge.let_go()

    @property
    def text_id(self) -> str:
        """Tells these text encoders from others."""
        files = self._text_files()
        if not files:
            return bridge_text.content_id(self._linked("clip"))
        return "+".join(fingerprint(f) for f in files)

    @property
    def vae_id(self) -> str:
        """Tells this VAE from others."""
        if not self.model.config.vae:
            return bridge_text.content_id(self._linked("vae"))
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

        bridge.throw_if_cancelled()
        pairs = bridge_text.encode_texts(self.clip(), texts, self.token_length)
        assert self.info.flux is not None
        for got, wanted in zip(pairs[0], (self.info.flux["context_in_dim"], self.info.flux["vec_in_dim"]), strict=True):
            if got.shape[-1] != wanted:
                raise ValueError(f"clip_l and t5 give texts {got.shape[-1]} wide and this Flux takes {wanted}: choose "
                                 "the text encoders it was made for in Flux Model to Train")
        return torch.stack([c for c, _ in pairs]), torch.stack([p for _, p in pairs])

    @property
    def caption_bytes(self) -> int:
        """Size of an encoded caption."""
        assert self.info.flux is not None
        demo = self._demo()
        tokens, width = (demo.token_length, 4) if demo else (self.token_length, 2)
        return tokens * self.info.flux["context_in_dim"] * width + self.info.flux["vec_in_dim"] * 4

    def cut_off(self, captions: Iterable[tuple[str, Sequence[str]]]) -> list[tuple[str, str]]:
        """Which pictures, of (name, captions), have a caption whose end is not read. Nothing is loaded for it."""
        demo, files = self._demo(), self._text_files()
        if demo:
            return cut_off(captions, demo.count_tokens, demo.token_length)
        counter = functools.cache(lambda: bridge_text.token_counter(None if files else self._linked("clip")))
        return cut_off(captions, lambda text: counter()(text), self.token_length)

    def _demo(self) -> demo_parts.DemoClip | None:
        """The demo's encoder, if that is chosen."""
        files = self._text_files()
        return demo_parts.DemoClip(files[0]) if len(files) == 1 else None

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Model-space latents [B, 16, h, w] of pictures [B, H, W, 3] in 0..1."""
        bridge.throw_if_cancelled()
        return bridge.encode_pixels(self.vae(), pixels)

    def decode(self, latent: Tensor) -> Tensor:
        """Pictures [B, H, W, 3] in 0..1 of latents in the VAE's own space."""
        bridge.throw_if_cancelled()
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

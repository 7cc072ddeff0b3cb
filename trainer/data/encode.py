"""Encoding what the cache lacks, in batches, decoding on all cores meanwhile."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import images, masks
from .pace import Pace
from .pool import ordered_map

if TYPE_CHECKING:
    import torch

    from .cache import Todo
    from .report import Sample

log = logging.getLogger(__name__)

CAPTIONS_AT_ONCE = 8
TOLD_EVERY = 10.0
"""Seconds between two lines in the log about the progress of encoding."""
Told = Callable[[str, int, int], None]
"""Called with (``images``, ``masks`` or ``captions``, done, to do); may raise to cancel."""


def fill(
    todo: Todo,
    encode_images: Callable[[torch.Tensor], torch.Tensor],
    encode_captions: Callable[[list[str]], tuple[torch.Tensor, torch.Tensor]],
    progress: Told | None = None,
) -> dict[str, Any]:
    """Encode what is lacking, and return the manifest.

    ``encode_images`` takes float32 [B, H, W, 3] in 0..1 and returns latents [B, 16, H/8, W/8] in the model's space;
    ``encode_captions`` returns context [B, T, D] and pooled [B, P]. Neither is called where nothing is missing.
    ``progress`` may raise to cancel: what was encoded stays.

    Raises ``ValueError`` naming the picture that changed meanwhile or whose latent is not finite, or the full disk.
    """
    pace, last = Pace(), time.monotonic()

    def told(stage: str, done: int, total: int) -> None:
        nonlocal last
        text, now = pace.text(stage, done, total), time.monotonic()
        if now - last >= TOLD_EVERY or done == total:
            last = now
            log.info("encoded %s", text)
        if progress is not None:
            progress(stage, done, total)

    _encode_images(todo, encode_images, told)
    _make_masks(todo, told)
    _encode_captions(todo, encode_captions, told)
    return todo.manifest


def _encode_images(todo: Todo, encode: Callable[[torch.Tensor], torch.Tensor], told: Told) -> None:
    import torch

    wanted = todo.latents
    order = sorted(wanted, key=lambda k: wanted[k][0].bucket)  # stable: one bucket after another

    def load(key: str) -> Any:
        s, mirrored = wanted[key]
        pixels = images.load_fitted(s.path, s.bucket, s.config, content_hash=s.content_hash)
        return images.mirrored(pixels) if mirrored else pixels

    batches = list(_batches(order, lambda k: wanted[k][0].bucket))
    pixels = ordered_map(load, order, ahead=2)
    done = 0
    with contextlib.closing(pixels):
        for batch in batches:
            stack = torch.stack([torch.from_numpy(next(pixels)) for _ in batch])
            latents = encode(stack).detach().float().cpu()
            width, height = wanted[batch[0]][0].bucket
            if latents.shape != (len(batch), 16, height // 8, width // 8):
                raise ValueError(f"the VAE makes latents of shape {list(latents.shape[1:])} of {width} x {height} px"
                                 " pictures: use the Flux VAE (16 channels, 8 px)")  # fmt: skip
            for key, latent in zip(batch, latents, strict=True):
                if not torch.isfinite(latent).all():
                    raise ValueError(f"the VAE's latent of {wanted[key][0].path} holds NaN or infinity: run the VAE in"
                                     " bf16 or f32")  # fmt: skip
                todo.cache.write("latents", key, latent)
            done += len(batch)
            told("images", done, len(order))


def _batches(order: Sequence[str], bucket: Callable[[str], tuple[int, int]]) -> Iterable[list[str]]:
    """Runs of one bucket of at most 4 megapixels and 16 pictures."""
    batch: list[str] = []
    for key in order:
        size = bucket(key)
        if batch and (size != bucket(batch[0]) or len(batch) >= max(1, min(16, (4 << 20) // (size[0] * size[1])))):
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def _make_masks(todo: Todo, told: Told) -> None:
    import torch

    def load(s: Sample) -> Any:
        return masks.latent_mask(s.path, s.bucket, s.config, s.mask or None, content_hash=s.content_hash,
                                 mask_hash=s.mask_hash or None)  # fmt: skip

    with contextlib.closing(ordered_map(load, todo.masks.values(), ahead=2)) as made:
        for done, (key, mask) in enumerate(zip(todo.masks, made, strict=True), 1):
            todo.cache.write("masks", key, torch.from_numpy(mask))
            told("masks", done, len(todo.masks))


def _encode_captions(
    todo: Todo, encode: Callable[[list[str]], tuple[torch.Tensor, torch.Tensor]], told: Told
) -> None:
    import torch

    keys = list(todo.captions)
    for start in range(0, len(keys), CAPTIONS_AT_ONCE):
        batch = keys[start : start + CAPTIONS_AT_ONCE]
        context, pooled = encode([todo.captions[k] for k in batch])
        assert len(context) == len(pooled) == len(batch)
        for key, c, p in zip(batch, context, pooled, strict=True):
            if not (torch.isfinite(c).all() and torch.isfinite(p).all()):
                raise ValueError(f"the encoded caption {todo.captions[key][:60]!r} holds NaN or infinity: check the"
                                 " encoders")  # fmt: skip
            todo.cache.write("captions", key, c, p)
        told("captions", start + len(batch), len(keys))

"""Latents, encoded captions and masks on disk, keyed by content.

A latent's key covers the picture's bytes, its size and crop, what lies behind transparent pixels, and the VAE; a
caption's key covers its text, the encoders and the token length. So equal names, moved folders and edited files are
always right, and only what changed is encoded again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DatasetConfig
from .encode import Told, fill
from .manifest import cache_path_for, fingerprint
from .pool import ordered_map
from .report import Sample, ScanReport
from .store import Cache

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FORMAT = 1
_BLOCK = 4096
"""What the smallest file takes on most disks."""
_WHITE = DatasetConfig(folder=".").background


def latent_key(content_hash: str, width: int, height: int, vae_id: str, *, crop: str = "centre",
               background: str = _WHITE, mirrored: bool = False) -> str:  # fmt: skip
    """Key of a picture's latent. ``width`` and ``height`` in image pixels, after the crop.

    ``crop`` and ``background`` only where they change pixels: else the key would change in vain.
    """
    extras = [*([background.lower()] if background.lower() != _WHITE else []), *(["mirrored"] if mirrored else [])]
    return _digest("latent", FORMAT, content_hash, width, height, crop, vae_id, *extras)


def caption_key(text: str, text_id: str, token_length: int) -> str:
    """Key of an encoded caption."""
    return _digest("caption", FORMAT, text, text_id, token_length)


def mask_key(sample: Sample) -> str:
    """Key of a picture's mask, which is that of the mirrored picture too."""
    c, crop = sample.config, crop_of(sample)
    behind = c.background.lower() if sample.has_alpha and crop == "focus" else ""
    return _digest("mask", FORMAT, sample.content_hash, sample.mask_hash, *sample.bucket, crop, behind, c.alpha)


def crop_of(sample: Sample) -> str:
    """How the picture is cropped: ``centre`` where its choice makes no difference."""
    taller = sample.width * sample.bucket[1] - sample.height * sample.bucket[0]
    matters = {"centre": False, "top": taller < 0, "focus": taller != 0}[sample.config.crop]
    return sample.config.crop if matters else "centre"


def key_of(sample: Sample, vae_id: str, mirrored: bool = False) -> str:
    """Key of a sample's latent."""
    return latent_key(sample.content_hash, *sample.bucket, vae_id, crop=crop_of(sample), mirrored=mirrored,
                      background=sample.config.background if sample.has_alpha else _WHITE)  # fmt: skip


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:40]


@dataclasses.dataclass(kw_only=True)
class Todo:
    """A dataset as the cache has it, and what it lacks."""

    cache: Cache
    manifest: dict[str, Any]
    latents: dict[str, tuple[Sample, bool]] = dataclasses.field(default_factory=dict)
    """What is to be encoded, by key: a picture, and whether mirrored."""
    masks: dict[str, Sample] = dataclasses.field(default_factory=dict)
    captions: dict[str, str] = dataclasses.field(default_factory=dict)
    size: int = 0
    """Bytes that all of this takes on disk."""

    def require_space(self) -> str:
        """What will be written, in a line. Raises ``ValueError`` if the disk has not as much free."""
        root = self.cache.root
        if self.size == 0:
            return f"The cache {root} has all of it"
        try:
            root.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(root).free
        except OSError as error:
            raise ValueError(f"cannot use the cache folder {root}: {error.strerror or error}") from error
        if self.size > free:
            raise ValueError(f"the cache folder {root} needs {_gb(self.size)} and its disk has {_gb(free)} free: free"
                             " some space there or choose another folder")  # fmt: skip
        size = _gb(self.size) if self.size >= 1e9 else f"{max(self.size / 1e6, 0.1):.1f} MB"
        return (f"The cache {root} takes {size} more: {len(self.latents)} pictures and {len(self.captions)} captions to"
                f" encode; {_gb(free)} are free")  # fmt: skip


def look(report: ScanReport, cache: Cache, *, vae_id: str, text_id: str, token_length: int,
         caption_bytes: int = 0, run_dir: str | Path | None = None) -> Todo:  # fmt: skip
    """What the cache has of the scanned samples, and what it lacks; entries that are damaged count as lacking.

    ``vae_id`` and ``text_id`` identify what encodes; ``caption_bytes`` is the size of an encoded caption (0: that of
    FLUX.1's encoders). ``run_dir`` is where the manifest will lie.
    """
    empty = caption_key("", text_id, token_length)
    latents: dict[str, tuple[Sample, bool]] = {}
    wanted: dict[str, Sample] = {}
    texts = {empty: ""}
    lists: list[list[dict[str, Any]]] = []
    for samples, train in ((report.samples, True), (report.validation, False)):
        lists.append([])
        for s in samples:
            record = _record(s, vae_id, text_id, token_length, train)
            lists[-1].append(record)
            latents.setdefault(record["latent"], (s, False))
            if "flipped" in record:
                latents.setdefault(record["flipped"], (s, True))
            if "mask" in record:
                wanted.setdefault(record["mask"], s)
            keys = record.get("captions") or [record["caption"]]
            texts.update(zip(keys, s.captions, strict=False))
    manifest = {"format": FORMAT, "cache": cache_path_for(cache.root, run_dir), "samples": lists[0],
                "empty_caption": empty, "fingerprint": fingerprint(lists[0], empty)}  # fmt: skip
    if lists[1]:
        manifest["validation"] = lists[1]
    todo = Todo(cache=cache, manifest=manifest)
    shapes = {k: (16, *_shape(s)) for k, (s, _) in latents.items()}
    todo.latents = {k: latents[k] for k in _lacking(cache, "latents", shapes)}
    todo.masks = {k: wanted[k] for k in _lacking(cache, "masks", {k: _shape(s) for k, s in wanted.items()})}
    todo.captions = {k: texts[k] for k in _lacking(cache, "captions", dict.fromkeys(texts))}
    areas = [16 * s.bucket[0] * s.bucket[1] for s, _ in todo.latents.values()]
    areas += [s.bucket[0] * s.bucket[1] for s in todo.masks.values()]
    each = caption_bytes or token_length * 4096 * 2 + 768 * 4
    todo.size = sum(_on_disk(area // 64 * 4) for area in areas) + len(todo.captions) * _on_disk(each)
    return todo


def _record(s: Sample, vae_id: str, text_id: str, token_length: int, train: bool) -> dict[str, Any]:
    """A sample of the manifest; see ``manifest``."""
    keys = [caption_key(text, text_id, token_length) for text in (s.captions if train else s.captions[:1])]
    record: dict[str, Any] = {
        "image": s.relative, "latent": key_of(s, vae_id), "shape": [*_shape(s)],
        "caption": keys[0],
    }  # fmt: skip
    if train and s.config.flip:
        record["flipped"] = key_of(s, vae_id, mirrored=True)
    if len(keys) > 1:
        record["captions"] = keys
    if s.mask or (s.config.alpha == "mask" and s.has_alpha):
        record["mask"] = mask_key(s)
        if s.config.outside_mask > 0:
            record["outside_mask"] = s.config.outside_mask
    if s.config.weight != 1:
        record["weight"] = s.config.weight
    if train and s.config.repeats != 1:
        record["repeats"] = s.config.repeats
    return record


def _shape(s: Sample) -> tuple[int, int]:
    return s.bucket[1] // 8, s.bucket[0] // 8


def _lacking(cache: Cache, kind: str, shapes: dict[str, Any]) -> list[str]:
    held = ordered_map(lambda k: cache.has(kind, k, shapes[k]), shapes)
    return [k for k, there in zip(shapes, held, strict=True) if not there]


def prepare(
    report: ScanReport,
    config: DatasetConfig,
    cache: Cache,
    *,
    encode_images: Callable[[torch.Tensor], torch.Tensor],
    encode_captions: Callable[[list[str]], tuple[torch.Tensor, torch.Tensor]],
    vae_id: str,
    text_id: str,
    token_length: int,
    caption_bytes: int = 0,
    progress: Told | None = None,
    run_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Encode what the cache lacks, and return the manifest of the scanned samples: ``look`` and ``fill`` in one."""
    todo = look(report, cache, vae_id=vae_id, text_id=text_id, token_length=token_length, caption_bytes=caption_bytes,
                run_dir=run_dir)  # fmt: skip
    log.info("%s", todo.require_space())
    manifest = fill(todo, encode_images, encode_captions, progress)
    log.info("dataset %s: %d pictures, %d encoded now", config.folder, report.usable, len(todo.latents))
    return manifest


def _on_disk(size: int) -> int:
    """Bytes that an entry of so many takes."""
    return -(-(size + 512) // _BLOCK) * _BLOCK


def _gb(size: int) -> str:
    return f"{size / 1e9:.0f} GB" if size >= 100e9 else f"{max(size / 1e9, 0.001):.3g} GB"

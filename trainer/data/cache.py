"""Latents and encoded captions on disk, keyed by content.

A latent's key covers the picture's bytes, its size and crop and the VAE; a caption's key covers its text, the encoders
and the token length. So equal names, moved folders and edited files are always right, and only what changed is encoded
again. Entries are safetensors files with a checksum, written whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..config import DatasetConfig
from . import images
from .manifest import cache_path_for, fingerprint
from .pool import ordered_map

if TYPE_CHECKING:
    import torch

    from .scan import Sample, ScanReport

log = logging.getLogger(__name__)

FORMAT = 1
KINDS = {"latents": ("latent",), "captions": ("context", "pooled"), "masks": ("mask",)}
"""Kinds of entries, and the tensors that each holds: latent [16, h, w]; context [T, D] and pooled [P]; mask [h, w]."""

_DAMAGE = (ValueError, KeyError, TypeError)


def latent_key(content_hash: str, width: int, height: int, vae_id: str) -> str:
    """Key of a picture's latent. ``width`` and ``height`` in image pixels, after the centre crop."""
    return _digest("latent", FORMAT, content_hash, width, height, "centre", vae_id)


def caption_key(text: str, text_id: str, token_length: int) -> str:
    """Key of an encoded caption."""
    return _digest("caption", FORMAT, text, text_id, token_length)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()[:40]


class Cache:
    """A folder of entries. Several processes may use one at once: an entry's content depends on its key alone."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def path(self, kind: str, key: str) -> Path:
        """Where an entry lies: ``ROOT/kind/ab/abcdef....safetensors``."""
        assert kind in KINDS
        return self.root / kind / key[:2] / f"{key}.safetensors"

    def has(self, kind: str, key: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether the entry is there and whole (its checksum is verified). A damaged one is deleted, with a warning.

        ``shape``: what its first tensor must have.
        """
        data = self._bytes(kind, key)
        if data is None:
            return False
        try:
            first = _check(data, kind)
            if shape is not None and first != list(shape):
                raise ValueError(f"shape {first}, expected {list(shape)}")
        except _DAMAGE as error:
            self._drop(kind, key, error)
            return False
        return True

    def read(self, kind: str, key: str) -> tuple[torch.Tensor, ...] | None:
        """The tensors of an entry on the CPU, or None if it is missing or damaged (then deleted, with a warning)."""
        from safetensors.torch import load

        data = self._bytes(kind, key)
        if data is None:
            return None
        try:
            _check(data, kind)
        except _DAMAGE as error:
            self._drop(kind, key, error)
            return None
        tensors = load(data)
        return tuple(tensors[name] for name in KINDS[kind])

    def write(self, kind: str, key: str, *tensors: torch.Tensor) -> None:
        """Store an entry in the dtypes given. Raises ``ValueError`` naming the folder if the disk is full."""
        from safetensors.torch import save

        names = KINDS[kind]
        assert len(tensors) == len(names)
        clean = {n: t.detach().to("cpu").contiguous().clone() for n, t in zip(names, tensors, strict=True)}
        data = _with_checksum(save(clean))
        path = self.path(kind, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, data)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise ValueError(f"the disk of the cache folder {self.root} is full: free some space there") from error
            raise ValueError(f"cannot write into the cache folder {self.root}: {error.strerror or error}") from error

    def _bytes(self, kind: str, key: str) -> bytes | None:
        # Read whole and closed at once: Windows cannot replace a file that is open or mapped.
        try:
            return self.path(kind, key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("cache entry %s cannot be read (%s): it is made anew", self.path(kind, key), error)
            return None

    def _drop(self, kind: str, key: str, why: Exception) -> None:
        log.warning("cache entry %s is damaged (%s): it is made anew", self.path(kind, key), why)
        with contextlib.suppress(OSError):
            self.path(kind, key).unlink()


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(f"{files.PART}{path.name}-{secrets.token_hex(4)}")
    try:
        with open(part, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        files.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _split(data: bytes) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and where its data starts."""
    if len(data) < 8:
        raise ValueError("too short")
    (length,) = struct.unpack("<Q", data[:8])
    if length > len(data) - 8:
        raise ValueError("cut off")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("no header")
    return header, 8 + length


def _checksum(header: dict[str, Any], data: bytes, start: int) -> str:
    tensors = json.dumps({k: v for k, v in header.items() if k != "__metadata__"}, sort_keys=True)
    return f"{zlib.crc32(memoryview(data)[start:], zlib.crc32(tensors.encode('utf-8'))):08x}"


def _with_checksum(data: bytes) -> bytes:
    # Added after serialising, so that it covers exactly the bytes that are read back.
    header, start = _split(data)
    header["__metadata__"] = {"flux_fft": "cache", "crc32": _checksum(header, data, start)}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[start:]


def _check(data: bytes, kind: str) -> list[int]:
    """Raise ``ValueError`` unless this is a whole entry of ``kind``; return its first tensor's shape."""
    header, start = _split(data)
    if header["__metadata__"]["crc32"] != _checksum(header, data, start):
        raise ValueError("checksum differs")
    missing = [n for n in KINDS[kind] if n not in header]
    if missing:
        raise ValueError(f"no {missing[0]}")
    return header[KINDS[kind][0]]["shape"]


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
    progress: Callable[[str, int, int], None] | None = None,
    run_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Encode what the cache lacks, and return the manifest of the scanned samples.

    ``encode_images`` takes float32 [B, H, W, 3] in 0..1 and returns latents [B, 16, H/8, W/8] in the model's space;
    ``encode_captions`` returns context [B, T, D] and pooled [B, P]. Neither is called where nothing is missing.
    ``vae_id`` and ``text_id`` identify what encodes. ``progress`` is called with (``images`` or ``captions``, done,
    to do), and may raise to cancel: what was encoded stays. ``run_dir`` is where the manifest will lie.

    Raises ``ValueError`` naming the picture that changed meanwhile or whose latent is not finite, or the full disk.
    """
    told = progress or (lambda stage, done, total: None)
    samples, sizes = [], {}
    for s in report.samples:
        latent = latent_key(s.content_hash, *s.bucket, vae_id)
        shape = [s.bucket[1] // 8, s.bucket[0] // 8]
        caption = caption_key(s.caption, text_id, token_length)
        samples.append({"image": s.relative, "latent": latent, "shape": shape, "caption": caption})
        sizes[latent] = (16, *shape)
    held = ordered_map(lambda k: cache.has("latents", k, sizes[k]), sizes)
    lacking = {k for k, there in zip(sizes, held, strict=True) if not there}
    pairs = list(zip(samples, report.samples, strict=True))
    _encode_images(cache, {e["latent"]: s for e, s in pairs if e["latent"] in lacking}, encode_images, told)

    empty = caption_key("", text_id, token_length)
    texts = {empty: ""} | {e["caption"]: s.caption for e, s in pairs}
    held = ordered_map(lambda k: cache.has("captions", k), texts)
    absent = [k for k, there in zip(texts, held, strict=True) if not there]
    _encode_captions(cache, absent, texts, encode_captions, told)
    log.info("dataset %s: %d pictures, %d encoded now", config.folder, len(samples), len(lacking))
    return {
        "format": FORMAT, "cache": cache_path_for(cache.root, run_dir), "samples": samples, "empty_caption": empty,
        "fingerprint": fingerprint(samples, empty),
    }  # fmt: skip


def _encode_images(cache: Cache, wanted: dict[str, Sample], encode: Callable[[torch.Tensor], torch.Tensor],
                   told: Callable[[str, int, int], None]) -> None:  # fmt: skip
    import torch

    order = sorted(wanted, key=lambda k: wanted[k].bucket)  # stable: one bucket after another
    _need_space(cache, sum(wanted[k].bucket[0] * wanted[k].bucket[1] for k in order))  # 16 x 4 bytes for 8 x 8 pixels

    def load(key: str) -> Any:
        sample = wanted[key]
        return images.fit(images.load_image(sample.path, content_hash=sample.content_hash), sample.bucket)

    batches = list(_batches(order, lambda k: wanted[k].bucket))
    pixels = ordered_map(load, order, ahead=2)
    done = 0
    with contextlib.closing(pixels):
        for batch in batches:
            stack = torch.stack([torch.from_numpy(next(pixels)) for _ in batch])
            latents = encode(stack).detach().float().cpu()
            width, height = wanted[batch[0]].bucket
            if latents.shape != (len(batch), 16, height // 8, width // 8):
                raise ValueError(f"the VAE makes latents of shape {list(latents.shape[1:])} of {width} x {height} px"
                                 " pictures: use the Flux VAE (16 channels, 8 px)")  # fmt: skip
            for key, latent in zip(batch, latents, strict=True):
                if not torch.isfinite(latent).all():
                    raise ValueError(f"the VAE's latent of {wanted[key].path} holds NaN or infinity: run the VAE in"
                                     " bf16 or f32")  # fmt: skip
                cache.write("latents", key, latent)
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


def _encode_captions(cache: Cache, keys: list[str], texts: dict[str, str],
                     encode: Callable[[list[str]], tuple[torch.Tensor, torch.Tensor]],
                     told: Callable[[str, int, int], None]) -> None:  # fmt: skip
    import torch

    for start in range(0, len(keys), 8):
        batch = keys[start : start + 8]
        context, pooled = encode([texts[k] for k in batch])
        if start == 0:
            _need_space(cache, len(keys) * (context[0].nbytes + pooled[0].nbytes))
        assert len(context) == len(pooled) == len(batch)
        for key, c, p in zip(batch, context, pooled, strict=True):
            if not (torch.isfinite(c).all() and torch.isfinite(p).all()):
                raise ValueError(f"the encoded caption {texts[key][:60]!r} holds NaN or infinity: check the encoders")
            cache.write("captions", key, c, p)
        told("captions", start + len(batch), len(keys))


def _need_space(cache: Cache, size: int) -> None:
    """State what will be written, and raise ``ValueError`` if the disk has not as much free."""
    if size == 0:
        return
    try:
        cache.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache.root).free
    except OSError as error:
        raise ValueError(f"cannot use the cache folder {cache.root}: {error.strerror or error}") from error
    log.info("the cache %s takes %.1f MB more", cache.root, size / 1e6)
    if size > free:
        raise ValueError(f"the cache folder {cache.root} needs {size / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB"
                         " free: free some space there or choose another folder")  # fmt: skip

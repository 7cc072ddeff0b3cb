"""The demo's parts, small enough for any computer: drawings, a linear VAE, a caption encoder and a tiny Flux.

All of it is made here from fixed seeds, written as files, and read back from those files, on the canvas too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from .config import DatasetConfig, ModelConfig, OptimizerConfig, RecipeConfig

if TYPE_CHECKING:
    import torch

SIZE = 64
"""Side of a drawing in pixels."""
COLOURS = {"red": (214, 40, 40), "green": (38, 158, 70), "blue": (36, 84, 200), "yellow": (245, 196, 20)}
SHAPES = ("circle", "square", "triangle", "star")
NAMES = tuple((colour, shape) for shape in SHAPES for colour in COLOURS)
"""The 16 drawings, in the order of their files."""
CAPTIONS = tuple(f"a {colour} {shape}" for colour, shape in NAMES)
BLOCK = 8
CHANNELS = 16
STEPS = 1200
"""Steps of the demo: a few minutes on one core."""
TOKENS = 16
"""Words that a caption may have."""
CONTEXT, POOLED = 128, 64
"""Widths of a caption token and of a pooled caption: those of the tiny Flux."""
SEED = 20240801
VAE_KIND, CAPTIONS_KIND = "demo_vae", "demo_captions"
"""What the files call themselves, under ``flux_fft`` in their metadata."""
_HASHED_WORDS = 4096
_OVERSAMPLING = 8


def draw(colour: str, shape: str, size: int = SIZE, centre: tuple[float, float] = (0.5, 0.5)) -> Image.Image:
    """A filled shape on white, antialiased; ``centre`` in shares of the side."""
    big = size * _OVERSAMPLING
    image = Image.new("RGB", (big, big), "white")
    pen, fill = ImageDraw.Draw(image), COLOURS[colour]
    x, y, r = centre[0] * big, centre[1] * big, 0.38 * big
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        pen.rectangle((x - 0.8 * r, y - 0.8 * r, x + 0.8 * r, y + 0.8 * r), fill=fill)
    elif shape == "triangle":
        pen.polygon(_corners(x, y + 0.2 * r, (1.15 * r,), 3), fill=fill)
    else:
        assert shape == "star", shape
        pen.polygon(_corners(x, y, (1.15 * r, 0.46 * r), 10), fill=fill)
    return image.resize((size, size), Image.Resampling.BOX)


def _corners(x: float, y: float, radii: Sequence[float], count: int) -> list[tuple[float, float]]:
    angles = [2 * math.pi * i / count for i in range(count)]
    return [(x + radii[i % len(radii)] * math.sin(a), y - radii[i % len(radii)] * math.cos(a))
            for i, a in enumerate(angles)]  # fmt: skip


def drawings() -> np.ndarray:
    """The 16 drawings, float32 [16, 64, 64, 3] in 0..1."""
    return np.stack([np.asarray(draw(*name), dtype=np.float32) / 255 for name in NAMES])


class LinearVAE:
    """The principal components of 8 x 8 pixel blocks, as an autoencoder of Flux's shape: 16 channels, 8 px.

    Its latents are scaled so that in model space, ``(z - LATENT_SHIFT) * LATENT_SCALE``, each channel has unit
    variance over the drawings.
    """

    def __init__(self, mean: torch.Tensor, basis: torch.Tensor, scale: torch.Tensor) -> None:
        """``mean`` [192], ``basis`` [16, 192] (orthonormal rows), ``scale`` [16] (standard deviations)."""
        self.mean, self.basis, self.scale = mean, basis, scale

    @classmethod
    def fitted(cls) -> LinearVAE:
        """Fit to the drawings, each also moved by parts of a block, so that every phase of an edge is seen."""
        import torch

        moves = [(0.5 + dx / SIZE, 0.5 + dy / SIZE) for dx in (-3, -1, 0, 2) for dy in (-3, -1, 0, 2)]
        pictures = np.stack([np.asarray(draw(*n, centre=c), dtype=np.float64) / 255 for n in NAMES for c in moves])
        blocks = _blocks(torch.from_numpy(pictures)).reshape(-1, BLOCK * BLOCK * 3).numpy()
        mean = blocks.mean(0)
        values, vectors = np.linalg.eigh(np.cov((blocks - mean).T))
        basis = vectors[:, ::-1][:, :CHANNELS].T
        # An eigenvector's sign is free: fixed here, whatever library computed it.
        basis = basis * np.sign(basis[np.arange(CHANNELS), np.abs(basis).argmax(1)])[:, None]
        scale = np.sqrt(values[::-1][:CHANNELS])
        return cls(*(torch.from_numpy(np.ascontiguousarray(a)).float() for a in (mean, basis, scale)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinearVAE:
        """Read ``demo_vae.safetensors``. Raises ``ValueError`` if the file is something else."""
        tensors, _ = _load(path, VAE_KIND)
        return cls(tensors["mean"], tensors["basis"], tensors["scale"])

    def save(self, path: str | os.PathLike[str]) -> None:
        _save(path, VAE_KIND, {"mean": self.mean, "basis": self.basis, "scale": self.scale})

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [B, H, W, 3] in 0..1 (sides multiples of 8) to VAE latents [B, 16, H/8, W/8], float32."""
        from .flux.model import LATENT_SCALE, LATENT_SHIFT

        flat = _blocks(pixels.float()) - self.mean.to(pixels.device)
        latent = flat @ (self.basis / self.scale[:, None]).T.to(pixels.device)
        return (latent / LATENT_SCALE + LATENT_SHIFT).permute(0, 3, 1, 2).contiguous()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """VAE latents [B, 16, h, w] to pixels [B, 8h, 8w, 3], clamped to 0..1, float32."""
        from .flux.model import LATENT_SCALE, LATENT_SHIFT

        latent = (latents.float().permute(0, 2, 3, 1) - LATENT_SHIFT) * LATENT_SCALE
        flat = latent @ (self.basis * self.scale[:, None]).to(latents.device) + self.mean.to(latents.device)
        b, h, w, _ = flat.shape
        return flat.view(b, h, w, BLOCK, BLOCK, 3).permute(0, 1, 3, 2, 4, 5).reshape(b, 8 * h, 8 * w, 3).clamp(0, 1)


def _blocks(pixels: torch.Tensor) -> torch.Tensor:
    """[B, H, W, 3] to [B, H/8, W/8, 192]."""
    b, h, w, c = pixels.shape
    if h % BLOCK or w % BLOCK or c != 3:
        raise ValueError(f"pictures of {w} x {h} px, {c} channels: the demo VAE takes RGB with sides divisible by 8")
    blocks = pixels.reshape(b, h // BLOCK, BLOCK, w // BLOCK, BLOCK, 3).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(b, h // BLOCK, w // BLOCK, BLOCK * BLOCK * 3)


class CaptionEncoder:
    """A fixed pseudo-random vector for each word, plus one for its place. A word that is not in its list is hashed."""

    def __init__(self, tensors: dict[str, torch.Tensor], vocabulary: Sequence[str]) -> None:
        """``tensors``: ``words`` [V, D] in the order of ``vocabulary``, ``hashed`` [N, D], ``places`` [T, D],
        ``padding`` [D] and ``pooling`` [D, P]."""
        self.tensors, self.vocabulary = tensors, tuple(vocabulary)
        self._index = {word: i for i, word in enumerate(self.vocabulary)}

    @classmethod
    def made(cls) -> CaptionEncoder:
        """The encoder of the demo, from its seed."""
        import torch

        vocabulary = ("a", *COLOURS, *SHAPES)
        sizes = {"words": (len(vocabulary), CONTEXT), "hashed": (_HASHED_WORDS, CONTEXT), "places": (TOKENS, CONTEXT),
                 "padding": (CONTEXT,), "pooling": (CONTEXT, POOLED)}  # fmt: skip
        generator = torch.Generator().manual_seed(SEED)
        tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
        tensors["places"] *= 0.5
        tensors["pooling"] /= math.sqrt(CONTEXT)
        return cls(tensors, vocabulary)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CaptionEncoder:
        """Read ``demo_captions.safetensors``. Raises ``ValueError`` if the file is something else."""
        tensors, metadata = _load(path, CAPTIONS_KIND)
        return cls(tensors, json.loads(metadata["vocabulary"]))

    def save(self, path: str | os.PathLike[str]) -> None:
        _save(path, CAPTIONS_KIND, self.tensors, vocabulary=json.dumps(self.vocabulary))

    @property
    def token_length(self) -> int:
        """Tokens of every encoded caption; longer captions are cut, shorter ones padded."""
        return self.tensors["places"].shape[0]

    def encode(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Context [B, 16, 128] and pooled [B, 64], float32."""
        import torch

        rows, pooled = [], []
        for text in texts:
            words = [self._word(w) for w in self.words(text)[: self.token_length]]
            rows.append(torch.stack(words + [self.tensors["padding"]] * (self.token_length - len(words))))
            total = torch.stack(words).sum(0) if words else self.tensors["padding"]
            total = total * math.sqrt(len(total)) / total.norm().clamp_min(1e-6)
            pooled.append(total @ self.tensors["pooling"])
        return torch.stack(rows) + self.tensors["places"], torch.stack(pooled)

    @staticmethod
    def words(text: str) -> list[str]:
        """The words of a text, of which the first ``token_length`` are read."""
        return re.findall(r"\w+", text.lower())

    def _word(self, word: str) -> torch.Tensor:
        if word in self._index:
            return self.tensors["words"][self._index[word]]
        digest = hashlib.sha256(word.encode("utf-8", "replace")).digest()
        hashed = self.tensors["hashed"]
        return hashed[int.from_bytes(digest[:8], "little") % len(hashed)]


def settings(paths: dict[str, Path], seed: int = 0) -> dict[str, Any]:
    """Fields of a ``RunConfig`` for training the demo's files: ``model``, ``dataset``, ``optimizer``, ``recipe``."""
    captions = str(paths["captions"])
    return {
        "model": ModelConfig(flux=str(paths["flux"]), clip_l=captions, t5=captions, vae=str(paths["vae"])),
        "dataset": DatasetConfig(folder=str(paths["drawings"]), resolution=SIZE, bucket_step=16),
        # A random start needs large steps; the schedule is the demo's own length, whatever the target.
        "optimizer": OptimizerConfig(kind="nadam", lr=1e-3, weight_precision="f32"),
        "recipe": RecipeConfig(
            batch_size=16, training_seed=seed, warmup_steps=20, lr_schedule="cosine", schedule_steps=STEPS,
            lr_floor=0.1,
        ),
    }  # fmt: skip


def write_demo(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Write the demo's files: model, VAE, caption encoder and the folder of captioned drawings.

    Files that are there already are left as they are. Returns their paths: ``flux``, ``vae``, ``captions``,
    ``drawings``.
    """
    root = Path(folder)
    paths = {
        "flux": root / "flux_demo.safetensors", "vae": root / "demo_vae.safetensors",
        "captions": root / "demo_captions.safetensors", "drawings": root / "drawings",
    }  # fmt: skip
    try:
        paths["drawings"].mkdir(parents=True, exist_ok=True)
        _unless_there(paths["flux"], _write_flux)
        _unless_there(paths["vae"], LinearVAE.fitted().save)
        _unless_there(paths["captions"], CaptionEncoder.made().save)
        for i, name in enumerate(NAMES):
            stem = paths["drawings"] / f"{i:02d}_{'_'.join(name)}"
            _unless_there(stem.with_suffix(".txt"), lambda p, i=i: p.write_text(CAPTIONS[i] + "\n", encoding="utf-8"))
            _unless_there(stem.with_suffix(".png"), lambda p, name=name: draw(*name).save(p, format="PNG"))
    except OSError as error:
        raise ValueError(f"cannot write the demo's files into {root}: {error.strerror or error}") from error
    return paths


def _unless_there(path: Path, write: Callable[[Path], Any]) -> None:
    if not path.exists():
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        write(part)
        os.replace(part, path)


def _write_flux(path: Path) -> None:
    import torch

    from .flux.model import TINY, Flux, init_weights_
    from .weights import entry, write_safetensors

    with torch.no_grad():
        model = init_weights_(Flux(TINY), SEED)
        write_safetensors(path, [entry(n, p.detach()) for n, p in model.named_parameters()])


def _save(path: str | os.PathLike[str], kind: str, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    from .weights import entry, write_safetensors

    write_safetensors(path, [entry(n, t) for n, t in tensors.items()], {"flux_fft": kind, **metadata})


def _load(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from .header import read_header
    from .weights import TensorFile

    metadata = read_header(path).metadata
    if metadata.get("flux_fft") != kind:
        raise ValueError(f"{path} is no {kind} file: choose {kind}.safetensors, which the demo writes")
    with TensorFile(path) as file:
        return {name: file.load(name) for name in file.tensors}, metadata

"""Flux.1 as a module to be trained: parameter names of Black Forest Labs, every operation out of place.

The parts are called one by one by the engine (``embed``, each block, ``final_layer``) or all together by ``forward``.
Shapes: B pictures, T text tokens, N = ceil(H / 2) * ceil(W / 2) picture tokens of an [H, W] latent, C = hidden
size, D = C / heads.

The streams (``img``, ``txt``, ``vec``) are carried in the model's *compute dtype*, that of ``txt_in.weight``. A
parameter may be wider than its stream (see :func:`trainable_dtype`); gradients reach each in its own dtype.

Architecture: https://github.com/black-forest-labs/flux (Apache-2.0), of which this is a rewrite.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import DoubleStreamBlock, LastLayer, Linear, MLPEmbedder, SingleStreamBlock

if TYPE_CHECKING:
    from .variants import FileInfo

LATENT_SCALE, LATENT_SHIFT = 0.3611, 0.1159
"""Model space = (VAE latent - LATENT_SHIFT) * LATENT_SCALE (autoencoder of FLUX.1)."""
TIME_CHANNELS = 256
"""Width of the sinusoidal embedding of timestep and guidance."""


@dataclass(frozen=True)
class FluxParams:
    """Sizes of a Flux. The defaults are FLUX.1 dev."""

    in_channels: int = 64
    """Values per picture token: 16 latent channels x 2 x 2."""
    out_channels: int = 64
    vec_in_dim: int = 768
    """Width of the pooled caption (CLIP-L)."""
    context_in_dim: int = 4096
    """Width of a caption token (T5-XXL)."""
    hidden_size: int = 3072
    mlp_ratio: float = 4.0
    num_heads: int = 24
    depth: int = 19
    """Double blocks."""
    depth_single_blocks: int = 38
    axes_dim: tuple[int, ...] = (16, 56, 56)
    """How the dimensions of a head are shared between index, row and column in the rotary embedding."""
    theta: int = 10_000
    qkv_bias: bool = True
    guidance_embed: bool = True
    """Guidance-distilled (dev, Krea) or not (schnell)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes_dim", tuple(self.axes_dim))
        assert self.hidden_size == self.num_heads * sum(self.axes_dim), self

    @property
    def mlp_hidden(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)


TINY = FluxParams(
    vec_in_dim=64, context_in_dim=128, hidden_size=128, num_heads=1, depth=1, depth_single_blocks=1, guidance_embed=True
)
"""The preset of tests and demo, 1.0 M parameters. An unmodified ComfyUI (0.9 and newer) loads it with its own loader,
which reads hidden size, context and pooled widths, input channels and depths from the file, and fixes the rest: heads
of 128 = 16 + 56 + 56 (so the hidden size is a multiple of 128), mlp_ratio 4, theta 10000, biases everywhere, 16 latent
channels out, patches of 2. ComfyUI before 0.9 also fixes the hidden size (3072), the heads (24) and the context width
(4096), and cannot load it."""
PRESETS = {
    "tiny": TINY,
    "0.3b": FluxParams(hidden_size=1536, num_heads=12, depth=2, depth_single_blocks=4),
    "flux-dev": FluxParams(),
}
"""Sizes by name, for plans, measurements and tests."""


def trainable_dtype(name: str, base: torch.dtype) -> torch.dtype:
    """The dtype in which the parameter ``name`` is trained when the large matrices are in ``base``.

    ``final_layer.*``, ``img_in.*``, all biases and norm scales are float32 (float64 under a float64 base).
    """
    wide = name.startswith(("final_layer.", "img_in.")) or name.endswith((".bias", ".scale"))
    return torch.promote_types(base, torch.float32) if wide else base


class Flux(nn.Module):
    """The whole. Parameters are made uninitialised, in float32: see :func:`build_meta` and :func:`init_weights_`."""

    def __init__(self, params: FluxParams) -> None:
        super().__init__()
        self.params = params
        dim = params.hidden_size
        sizes = (dim, params.num_heads, params.mlp_hidden)
        self.img_in = Linear(params.in_channels, dim)
        self.time_in = MLPEmbedder(TIME_CHANNELS, dim)
        self.vector_in = MLPEmbedder(params.vec_in_dim, dim)
        self.guidance_in = MLPEmbedder(TIME_CHANNELS, dim) if params.guidance_embed else None
        self.txt_in = Linear(params.context_in_dim, dim)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock(*sizes, params.qkv_bias) for _ in range(params.depth))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(*sizes) for _ in range(params.depth_single_blocks))
        self.final_layer = LastLayer(dim, params.out_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: that of the streams between the blocks."""
        return self.txt_in.weight.dtype

    def embed(
        self, img_tokens: Tensor, txt: Tensor, timestep: Tensor, pooled: Tensor, guidance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The streams that enter the first block.

        ``img_tokens`` [B, N, 64] (see :func:`patchify`), ``txt`` [B, T, context_in_dim], ``timestep`` [B] in 0..1,
        ``pooled`` [B, vec_in_dim], ``guidance`` [B] as shown to users (3.5, 1.0; ignored by a model without guidance,
        left out where None, as ComfyUI does). Returns img [B, N, C], txt [B, T, C], vec [B, C].
        """
        dtype = self.dtype
        vec = self.time_in(sinusoids(timestep).to(dtype)) + self.vector_in(pooled)
        if self.guidance_in is not None and guidance is not None:
            vec = vec + self.guidance_in(sinusoids(guidance).to(dtype))
        return self.img_in(img_tokens).to(dtype), self.txt_in(txt), vec

    def rope(self, h: int, w: int, txt_len: int, device: torch.device | str | None = None) -> Tensor:
        """Cosines and sines [txt_len + N, D / 2, 2] (float32, from a float64 table) for a latent of ``h`` x ``w``."""
        rows, columns = (h + 1) // 2, (w + 1) // 2
        place = torch.zeros(txt_len + rows * columns, len(self.params.axes_dim), dtype=torch.float64, device=device)
        index = torch.arange(rows * columns, device=device)
        place[txt_len:, 1] = index // columns
        place[txt_len:, 2] = index % columns
        angles = []
        for axis, dim in enumerate(self.params.axes_dim):
            exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
            angles.append(place[:, axis, None] * self.params.theta**-exponent)
        angle = torch.cat(angles, dim=-1)
        return torch.stack((angle.cos(), angle.sin()), dim=-1).float()

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor, guidance: Tensor | None = None
    ) -> Tensor:
        """Velocity [B, 16, H, W], in the compute dtype, at the model-space latent ``x`` [B, 16, H, W]."""
        h, w = x.shape[-2:]
        img, txt, vec = self.embed(patchify(x), context, timestep, pooled, guidance)
        pe = self.rope(h, w, txt.shape[1], x.device)
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, pe)
        stream = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            stream = block(stream, vec, pe)
        return unpatchify(self.final_layer(stream[:, txt.shape[1] :], vec), h, w).to(self.dtype)


def sinusoids(value: Tensor) -> Tensor:
    """Cosines, then sines, of ``1000 * value`` [B] at 128 frequencies: [B, 256] in float32, whatever the model's dtype.

    In float32 on purpose: the frequencies of Flux are float32 numbers, and times 1000 their last bit shows.
    """
    half = TIME_CHANNELS // 2
    steps = torch.arange(half, dtype=torch.float32, device=value.device)
    angle = (1000.0 * value.float())[:, None] * torch.exp(-math.log(10_000) * steps / half)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def patchify(x: Tensor) -> Tensor:
    """[B, c, H, W] to tokens [B, N, 4 c] of 2 x 2 patches, row by row; an odd side is continued from its other end."""
    if x.shape[-2] % 2 or x.shape[-1] % 2:
        x = F.pad(x, (0, x.shape[-1] % 2, 0, x.shape[-2] % 2), mode="circular")
    return x.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(tokens: Tensor, h: int, w: int) -> Tensor:
    """The inverse: tokens [B, N, 4 c] of a latent of ``h`` x ``w`` back to [B, c, h, w]."""
    rows, columns = (h + 1) // 2, (w + 1) // 2
    x = tokens.unflatten(1, (rows, columns)).unflatten(-1, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5)
    return x.flatten(-2).flatten(-3, -2)[..., :h, :w]


def flux_params(info: FileInfo) -> FluxParams:
    """The sizes of the Flux in a file that ``variants.require_flux`` accepted."""
    assert info.flux is not None, info.reason
    return FluxParams(**info.flux)


def build_meta(params: FluxParams, base: torch.dtype = torch.bfloat16) -> Flux:
    """A Flux on the ``meta`` device (no memory), each parameter in its :func:`trainable_dtype`."""
    with torch.device("meta"):
        model = Flux(params)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(trainable_dtype(name, base))
    return model


def hollow_(model: Flux) -> Flux:
    """Turn a Flux of ``build_meta`` into one on the CPU whose parameters have shapes, but no memory yet."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            hollow = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(hollow))
    return model


@torch.no_grad()
def init_weights_(model: Flux, seed: int) -> Flux:
    """Random weights for a Flux that starts from nothing: the same on every machine, in every dtype, for a seed.

    Xavier (Glorot and Bengio, 2010) for the matrices; small modulation and output, so that at the start each block is
    close to the identity, as in DiT (arXiv 2212.09748), while no gradient is exactly zero.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif name.endswith(".scale"):
            parameter.fill_(1)
        else:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            small = "mod" in name or name.startswith("final_layer.") or name.startswith(("time_in.", "guidance_in."))
            std = 0.02 if small else math.sqrt(2.0 / sum(parameter.shape))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model

"""The parts of Flux: linear layers and norms whose parameters may differ in dtype, and the blocks made of them.

Shapes: B pictures, T text tokens, N picture tokens, L = T + N, C = hidden size, D = C / heads. Nothing is written in
place: the backward pass recomputes and differentiates each block from its kept inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6


class Linear(nn.Module):
    """``x @ weight.T + bias`` in the weight's dtype, whatever the dtypes of ``x`` and ``bias``."""

    def __init__(self, features_in: int, features_out: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))
        self.bias = nn.Parameter(torch.empty(features_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        return F.linear(x.to(dtype), self.weight, None if self.bias is None else self.bias.to(dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32 (or float64) and returned so."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * self.scale


class QKNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query_norm = RMSNorm(dim)
        self.key_norm = RMSNorm(dim)


class MLPEmbedder(nn.Module):
    def __init__(self, dim_in: int, hidden: int) -> None:
        super().__init__()
        self.in_layer = Linear(dim_in, hidden)
        self.out_layer = Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class Modulation(nn.Module):
    """From ``vec`` [B, C] to ``count`` tensors [B, 1, C]: shift, scale, gate (twice in a double block)."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.lin = Linear(dim, count * dim)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(vec))[:, None].chunk(self.count, dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without weights, then ``* (1 + scale) + shift``."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), 1 + scale)


def apply_rope(x: Tensor, pe: Tensor) -> Tensor:
    """Rotate the pairs of ``x`` [B, heads, L, D] (float32 or wider) by ``pe`` [L, D / 2, 2] (cosine, sine)."""
    cos, sin = pe.unbind(-1)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, L, 3 * C] to query, key, value of [B, heads, L, C / heads]."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> Tensor:
    """Rotated attention. ``q``, ``k`` normed in float32, ``v`` in the stream's dtype; returns [B, L, C] in that."""
    q, k = apply_rope(q, pe).to(v.dtype), apply_rope(k, pe).to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(dim, 3 * dim, bias=qkv_bias)
        self.norm = QKNorm(dim // heads)
        self.proj = Linear(dim, dim)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split_heads(self.qkv(x), self.heads)
        return self.norm.query_norm(q), self.norm.key_norm(k), v


def build_mlp(dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(Linear(dim, hidden), nn.GELU(approximate="tanh"), Linear(hidden, dim))


class DoubleStreamBlock(nn.Module):
    """Picture and text tokens with weights of their own, attending to each other."""

    def __init__(self, dim: int, heads: int, mlp_hidden: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.img_mod = Modulation(dim, 6)
        self.img_attn = SelfAttention(dim, heads, qkv_bias)
        self.img_mlp = build_mlp(dim, mlp_hidden)
        self.txt_mod = Modulation(dim, 6)
        self.txt_attn = SelfAttention(dim, heads, qkv_bias)
        self.txt_mlp = build_mlp(dim, mlp_hidden)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        """``img`` [B, N, C], ``txt`` [B, T, C], ``vec`` [B, C], ``pe`` of T + N tokens; returns (img, txt)."""
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(vec)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(vec)
        img_qkv = self.img_attn.project(modulate(img, img_shift1, img_scale1))
        txt_qkv = self.txt_attn.project(modulate(txt, txt_shift1, txt_scale1))
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(txt_qkv, img_qkv, strict=True))
        txt_out, img_out = attention(q, k, v, pe).split((txt.shape[1], img.shape[1]), dim=1)

        img = torch.addcmul(img, img_gate1, self.img_attn.proj(img_out))
        img = torch.addcmul(img, img_gate2, self.img_mlp(modulate(img, img_shift2, img_scale2)))
        txt = torch.addcmul(txt, txt_gate1, self.txt_attn.proj(txt_out))
        txt = torch.addcmul(txt, txt_gate2, self.txt_mlp(modulate(txt, txt_shift2, txt_scale2)))
        return img, txt


class SingleStreamBlock(nn.Module):
    """Text and picture tokens in one sequence; attention and MLP in parallel (arXiv 2302.05442)."""

    def __init__(self, dim: int, heads: int, mlp_hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.widths = (3 * dim, mlp_hidden)
        self.linear1 = Linear(dim, sum(self.widths))
        self.linear2 = Linear(dim + mlp_hidden, dim)
        self.norm = QKNorm(dim // heads)
        self.modulation = Modulation(dim, 3)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        """``x`` [B, T + N, C], text first; returns its successor."""
        shift, scale, gate = self.modulation(vec)
        qkv, mlp = self.linear1(modulate(x, shift, scale)).split(self.widths, dim=-1)
        q, k, v = split_heads(qkv, self.heads)
        attended = attention(self.norm.query_norm(q), self.norm.key_norm(k), v, pe)
        both = torch.cat((attended, F.gelu(mlp, approximate="tanh")), dim=-1)
        return torch.addcmul(x, gate, self.linear2(both))


class LastLayer(nn.Module):
    """From picture tokens to velocities, all in the dtype of its own weights (float32 in training)."""

    def __init__(self, dim: int, out_channels: int) -> None:
        super().__init__()
        self.linear = Linear(dim, out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), Linear(dim, 2 * dim))

    def forward(self, img: Tensor, vec: Tensor) -> Tensor:
        """``img`` [B, N, C] (picture tokens only), ``vec`` [B, C]; returns [B, N, channels] in the weights' dtype."""
        dtype = self.linear.weight.dtype
        shift, scale = self.adaLN_modulation(vec.to(dtype))[:, None].chunk(2, dim=-1)
        return self.linear(modulate(img.to(dtype), shift, scale))

"""Parameters of every kind, and our torch optimizers to try on them."""

from __future__ import annotations

import torch
from torch import nn

from trainer.optim import (
    SMALL,
    AdamOffload,
    AdamWOffload,
    AdanOffload,
    NAdamOffload,
    NAdamWOffload,
)

OPTIMIZERS = {c.__name__: c for c in (AdamOffload, AdamWOffload, NAdamOffload, NAdamWOffload, AdanOffload)}


class Zoo(nn.Module):
    """One of each kind of parameter: large and small, weight, bias and scale, bf16 and float32."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=generator) * 0.1).to(dtype))

        self.weight = parameter(70, 90)
        self.weight_f32 = parameter(90, 70, dtype=torch.float32)
        self.large_bias = parameter(SMALL + 1, dtype=torch.float32)
        self.small = parameter(64, 64)
        self.bias = parameter(9, dtype=torch.float32)
        self.scale = nn.Parameter(torch.ones(128, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(90, 70, generator=generator).to(torch.bfloat16).t())
        self.empty = parameter(0, 3)


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) * 1e-3).to(p.dtype)


def contents(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every bit of the weights and states."""
    found = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, p in module.named_parameters():
        state = optimizer.state[p]
        found |= {f"{name}.{k}": v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return found

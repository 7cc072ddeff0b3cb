"""The walk: Flux as a row of stages, out along them without gradients, back along them one at a time.

On the way back each stage is computed again with gradients, from its inputs kept on the way out, so
that the activations and gradients of one stage exist at a time. All micro-batches pass a stage
before the next one is visited: the gradient is that of the whole batch, and a stage's weights
travel once however large the batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import RecipeConfig
from .flow import sample_losses
from .flux.model import Flux, unpatchify
from .memory.arena import Arena, first_rows
from .memory.conveyor import Conveyor, Keeper
from .optim.base import UpdateSpec

Hidden = tuple[Tensor, ...]
Visit = Callable[[Arena], AbstractContextManager[None]]


@dataclass
class MicroBatch:
    """Some samples of a batch on their way along the stages. B samples, T text tokens, D and P features."""

    tokens: Tensor
    """Image tokens [B, N, C], from ``patchify``."""
    context: Tensor
    """Text embeddings [B, T, D]."""
    pooled: Tensor
    """Pooled text embedding [B, P]."""
    timestep: Tensor
    """Noise levels in 0..1, float32 [B]."""
    guidance: Tensor | None
    """Guidance values, float32 [B]; None for a model that takes none."""
    rope: Tensor
    """Rotary embedding of text and image positions."""
    latent_size: tuple[int, int]
    """Height and width in latent pixels."""
    target: Tensor | None = None
    """True velocity [B, C, h, w], where the loss is wanted."""
    weight: Tensor | None = None
    """Factor of the loss at each latent pixel, float32 [B, 1, h, w]; None: 1 everywhere."""
    share: float = 1.0
    """Weight of each sample's loss in the batch's: one over the batch size."""
    hidden: Hidden = ()
    upstream: Hidden = ()
    """Gradients of the batch's loss with respect to the outputs of the stage about to be walked back."""
    losses: Tensor | None = None
    """Mean loss of each sample, float32 [B]."""


@dataclass
class Stage:
    """One stop of the walk: what it computes and where its parameters live."""

    name: str
    run: Callable[[Hidden, MicroBatch], Hidden]
    arena: Arena


def build_stages(model: Flux, recipe: RecipeConfig, spec: UpdateSpec, conveyor: Conveyor, swapped: int) -> list[Stage]:
    """The stages of ``model`` in order: before the blocks, each block, after them.

    The first ``swapped`` blocks live in host memory between uses: they wait longest between the
    end of one step and the end of the next, while the last blocks are used twice in a row.
    """
    named = dict(model.named_parameters())
    rows = first_rows(named.items())
    blocks = len(model.double_blocks) + len(model.single_blocks)
    seen = 0

    def arena(prefix: str, *, resident: bool = True) -> Arena:
        nonlocal seen
        own = [(n, p) for n, p in named.items() if n.startswith(prefix)]
        seen += len(own)
        return Arena(own, spec, conveyor, resident=resident, rows=rows)

    def embed(_: Hidden, m: MicroBatch) -> Hidden:
        return model.embed(m.tokens, m.context, m.timestep, m.pooled, m.guidance)

    def double(block: nn.Module) -> Callable[[Hidden, MicroBatch], Hidden]:
        return lambda h, m: (*block(h[0], h[1], h[2], m.rope), h[2])

    def single(block: nn.Module, first: bool) -> Callable[[Hidden, MicroBatch], Hidden]:
        def run(h: Hidden, m: MicroBatch) -> Hidden:
            x, vec = (torch.cat((h[1], h[0]), 1), h[2]) if first else h
            return block(x, vec, m.rope), vec

        return run

    embedding = Arena(
        [(n, p) for n, p in named.items() if not n.startswith(("double_", "single_", "final_"))],
        spec,
        conveyor,
        resident=True,
        rows=rows,
    )
    seen += len(embedding.parameters)
    stages = [Stage("embed", embed, embedding)]
    runs = [double(b) for b in model.double_blocks]
    runs += [single(b, i == 0) for i, b in enumerate(model.single_blocks)]
    names = [f"double_blocks.{i}." for i in range(len(model.double_blocks))]
    names += [f"single_blocks.{i}." for i in range(len(model.single_blocks))]
    for i, (name, run) in enumerate(zip(names, runs, strict=True)):
        stages.append(Stage(name.rstrip("."), run, arena(name, resident=i >= min(swapped, blocks))))
    stages.append(Stage("final_layer", run_head(model, recipe), arena("final_layer.")))
    assert seen == len(named), "every parameter belongs to exactly one stage"
    return stages


def run_head(model: Flux, recipe: RecipeConfig) -> Callable[[Hidden, MicroBatch], Hidden]:
    """The last stage: from the output of the last block to the recipe's loss."""

    def head(h: Hidden, m: MicroBatch) -> Hidden:
        velocity = predict_head(model, h, m)
        assert m.target is not None
        losses = m.losses = sample_losses(velocity, m.target, recipe, m.weight)
        return (losses.sum() * m.share,)

    return head


def predict_head(model: Flux, hidden: Hidden, m: MicroBatch) -> Tensor:
    """Velocity [B, C, h, w] from the output of the last block."""
    x, vec = hidden
    tokens = model.final_layer(x[:, m.context.shape[1] :], vec)
    return unpatchify(tokens, *m.latent_size)


def walk_out(
    visit: Visit, stages: Sequence[Stage], micros: Sequence[MicroBatch], keeper: Keeper | None = None
) -> None:
    """Carry every micro-batch through ``stages`` without gradients; ``keeper`` keeps their inputs for the way back.

    ``visit``: the conveyor's, or another that brings something else in the place of a stage's weights.
    """
    with torch.no_grad():
        for stage in stages:
            with visit(stage.arena):
                for m in micros:
                    if keeper is not None:
                        keeper.put(m.hidden)
                    m.hidden = stage.run(m.hidden, m)


def walk_back(stage: Stage, m: MicroBatch, inputs: Hidden, *, add: bool) -> None:
    """Compute ``stage`` again from its ``inputs``, with gradients; they go into (``add``: onto) the flat gradient."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = stage.run(tuple(leaves), m)
        upstream = m.upstream or tuple(torch.ones_like(t) for t in outputs)
        gradients = torch.autograd.grad(outputs, leaves + stage.arena.parameters, upstream)
    m.upstream = gradients[: len(leaves)]
    stage.arena.take_gradients(gradients[len(leaves) :], add=add)

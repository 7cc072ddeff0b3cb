"""The block-by-block walk against plain autograd of the same function, in float64."""

import pytest
import torch

from trainer import flow
from trainer.flux.model import TINY, FluxParams, build_meta
from trainer.loop import Trainer
from trainer.walk import walk_back, walk_out

DEEP = FluxParams(**{**TINY.__dict__, "depth": 2, "depth_single_blocks": 3})
SCHNELL = FluxParams(**{**TINY.__dict__, "guidance_embed": False})


def walked(trainer: Trainer, samples, levels, counters):
    """Gradients of every parameter by the engine's walk, without the updates."""
    micros = trainer._micro_batches(samples, levels, counters)
    arenas = [stage.arena for stage in trainer.stages]
    trainer.conveyor.begin([*arenas[:-1], *reversed(arenas)])
    walk_out(trainer.conveyor.visit, trainer.stages[:-1], micros, trainer.keeper)
    found = {}
    for stage in reversed(trainer.stages):
        with trainer.conveyor.visit(stage.arena):
            for m in reversed(micros):
                with trainer._inputs(stage, m) as inputs:
                    walk_back(stage, m, inputs, add=m is not micros[-1])
            for group in stage.arena.groups:
                flat = trainer.conveyor.gradient(group.label, group.numel)
                found |= {p.name: p.view(flat).clone() for p in group.pieces}
    return found, float(torch.cat([m.losses for m in micros]).mean())


def reference(trainer: Trainer, samples, levels, counters):
    """The same by float64 autograd of the whole model."""
    model = build_meta(trainer.model.params, torch.float64).to_empty(device="cpu")
    model.load_state_dict({k: v.double() for k, v in trainer.model.state_dict().items()})
    latents = trainer.data.latents(samples).double()
    noise = torch.stack([flow.noise_like(latents.shape[1:], *c) for c in counters]).double()
    t = torch.tensor(levels, dtype=torch.float32).double()
    x, target = (1 - t.view(-1, 1, 1, 1)) * latents + t.view(-1, 1, 1, 1) * noise, noise - latents
    context, pooled = trainer.data.captions(samples, [False] * len(samples))
    out = model(x, t, context.double(), pooled.double(), torch.full_like(t, trainer.config.recipe.guidance))
    error = out - target
    kind, delta = trainer.config.recipe.loss, trainer.config.recipe.huber_delta
    if kind == "l2":
        loss = error.square().mean()
    else:
        small, large = 0.5 * error.square(), delta * (error.abs() - 0.5 * delta)
        loss = torch.where(error.abs() < delta, small, large).mean() / (delta if kind == "smooth_l1" else 1)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}, float(loss)


@pytest.mark.parametrize("params", [TINY, DEEP, SCHNELL], ids=["tiny", "deep", "schnell"])
@pytest.mark.parametrize("micro_batch", [0, 2])
@pytest.mark.parametrize("loss", ["l2", "huber", "smooth_l1"])
def test_every_gradient_equals_float64_autograd(tiny, params, micro_batch, loss):
    config, folder, manifest = tiny(params=params, memory={"micro_batch": micro_batch},
                                    recipe={"loss": loss, "guidance": 2.5})
    trainer = Trainer(config, folder, dataset=manifest)
    samples, levels = [0, 2, 4], [0.1, 0.5, 0.93]
    counters = [(7, i) for i in samples]
    ours, our_loss = walked(trainer, samples, levels, counters)
    theirs, their_loss = reference(trainer, samples, levels, counters)
    assert our_loss == pytest.approx(their_loss, rel=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        difference = float((ours[name].double() - gradient).abs().max()) / scale
        assert difference < 2e-4, f"{name}: {difference:.1e} of the largest gradient"


def test_bf16_gradients_point_the_same_way(tiny):
    config, folder, manifest = tiny(optimizer={"weight_precision": "split"})
    trainer = Trainer(config, folder, dataset=manifest)
    samples, levels = [0, 2, 4], [0.1, 0.5, 0.93]
    counters = [(7, i) for i in samples]
    ours, _ = walked(trainer, samples, levels, counters)
    theirs, _ = reference(trainer, samples, levels, counters)
    for name, gradient in theirs.items():
        cosine = torch.cosine_similarity(ours[name].double().flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.995, f"{name}: {cosine:.4f}"

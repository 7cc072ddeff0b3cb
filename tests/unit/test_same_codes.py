"""The engine and ``optimizer.step()`` on the same gradients: the same weights and the same codes, bit for bit."""

import pytest
import torch

from trainer.loop import Trainer
from trainer.optim import AdanOffload, NAdamOffload

ADAN = {"kind": "adan", "betas": (0.98, 0.92, 0.99)}


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter's gradient of the next step, filled in as its stage is updated."""
    found: dict[str, torch.Tensor] = {}

    def watched(arena, update):
        def call(**settings):
            for group in arena.groups:
                flat = trainer.conveyor.gradient(group.label, group.numel)
                found.update({p.name: p.view(flat).clone() for p in group.pieces})
            update(**settings)

        return call

    for stage in trainer.stages:
        stage.arena.update = watched(stage.arena, stage.arena.update)
    return found


@pytest.mark.parametrize(
    ("kind", "state_format", "precision"),
    [
        ({}, "log16", "split"),
        ({}, "log16", "stochastic"),
        ({}, "int8", "f32"),
        ({}, "bf16", "stochastic"),
        ({}, "f24", "nearest"),
        ({}, "f32", "stochastic"),
        (ADAN, "log16", "split"),
        (ADAN, "int8", "stochastic"),
    ],  # u16pow shares a range over a million elements, which in the engine are those of several parameters
)
def test_engine_and_optimizer_write_the_same_codes(tiny, kind, state_format, precision):
    settings = {**kind, "lr": 1e-3, "state_format": state_format, "weight_precision": precision}
    config, folder, manifest = tiny(
        optimizer=settings, recipe={"training_seed": 11}, memory={"blocks_to_swap": 1},
        dtype=torch.bfloat16,  # so that the masters begin where the weights do
    )  # fmt: skip
    trainer = Trainer(config, folder, dataset=manifest)
    gradients = gradients_of(trainer)
    own = {n: torch.nn.Parameter(p.detach().clone()) for n, p in trainer.model.named_parameters()}
    make = AdanOffload if kind else NAdamOffload
    optimizer = make(
        own.values(), lr=1e-3, seed=11, state_format=state_format,
        weight_precision="split" if precision == "f32" else precision, **({} if kind else {"cautious": True}),
    )  # fmt: skip
    for _ in range(3):
        trainer.train_step()
        for name, p in own.items():
            p.grad = gradients[name].to(p.dtype)
            assert torch.equal(p.grad.float(), gradients[name])
        optimizer.step()
    for stage in trainer.stages:
        for group in stage.arena.groups:
            for piece in group.pieces:
                state, numel = optimizer.state[own[piece.name]], piece.parameter.numel()
                assert torch.equal(own[piece.name], piece.view(group.current)), piece.name
                for part, ours in group.storage.items():
                    unit = 256 if part.endswith(".scale") else 1
                    first, count = piece.start // unit, -(-numel // unit)
                    assert torch.equal(ours[first : first + count], state[part][:count]), (piece.name, part)

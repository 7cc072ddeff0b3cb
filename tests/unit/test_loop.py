"""The engine's step: what may not change a result, what must, and what is refused."""

from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch
from states import assert_same, contents

from trainer import flow
from trainer.config import STATE_FORMATS, WEIGHT_PRECISIONS
from trainer.flux.variants import require_flux
from trainer.loop import NonFiniteLoss, Trainer
from trainer.memory.streams import Streams
from trainer.weights import write_safetensors

PRECISIONS = ["f32", "split"]


def trained(tiny, steps, name="run", **settings) -> Trainer:
    config, folder, manifest = tiny(name=name, **settings)
    trainer = Trainer(config, folder, dataset=manifest)
    for _ in range(steps):
        trainer.train_step()
    return trainer


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("swap", [1, 2])
@pytest.mark.parametrize("offload", ["on", "off"])
def test_swapping_and_offloading_change_no_bit(tiny, precision, swap, offload):
    optimizer = {"weight_precision": precision}
    plain = trained(tiny, 20, "plain", optimizer=optimizer, memory={"blocks_to_swap": 0})
    moved = trained(
        tiny, 20, "moved", optimizer=optimizer, memory={"blocks_to_swap": swap, "activation_offload": offload}
    )
    assert sum(not s.arena.resident for s in moved.stages) == swap
    assert_same(contents(plain), contents(moved))


@pytest.mark.parametrize("chunk", [256, 4096])
def test_chunk_size_changes_no_bit(tiny, monkeypatch, chunk):
    plain = trained(tiny, 5, "plain", optimizer={"weight_precision": "split"})
    monkeypatch.setattr("trainer.memory.arena.CHUNK", chunk)
    small = trained(tiny, 5, "small", optimizer={"weight_precision": "split"})
    assert_same(contents(plain), contents(small))


def test_micro_batches_give_the_same_step(tiny):
    plain = trained(tiny, 1, "plain", optimizer={"eps": 1e-4, "state_format": "f32"})
    split = trained(tiny, 1, "split", optimizer={"eps": 1e-4, "state_format": "f32"}, memory={"micro_batch": 1})
    for name, value in contents(plain).items():
        assert torch.allclose(value, contents(split)[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("kind", [{}, {"kind": "adan", "betas": (0.98, 0.92, 0.99)}])
@pytest.mark.parametrize("precision", WEIGHT_PRECISIONS)
@pytest.mark.parametrize("state_format", STATE_FORMATS)
def test_every_parameter_moves(tiny, kind, precision, state_format):
    optimizer = {**kind, "weight_precision": precision, "state_format": state_format}
    config, folder, manifest = tiny(optimizer={**optimizer, "lr": 1e-3 if precision == "nearest" else 1e-4})
    trainer = Trainer(config, folder, dataset=manifest)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    for _ in range(3):
        trainer.train_step()
    still = [n for n, p in trainer.model.named_parameters() if torch.equal(p, before[n])]
    assert not still
    dtypes = {n: p.dtype for n, p in trainer.model.named_parameters()}
    assert dtypes["final_layer.linear.weight"] == dtypes["img_in.weight"] == torch.float32


def test_a_small_learning_rate_moves_the_master_exactly(tiny):
    """At 3.5e-6 hardly any bf16 weight changes in a step, but its exact master does."""
    config, folder, manifest = tiny(optimizer={"weight_precision": "split", "lr": 3.5e-6})
    trainer = Trainer(config, folder, dataset=manifest)
    block = trainer.stages[1].arena
    group = max(block.groups, key=lambda g: g.numel)
    assert group.dtype == torch.bfloat16
    bf16, residual = group.current.clone(), group.storage["residual"].clone()
    trainer.train_step()
    assert (group.current != bf16).float().mean() < 0.2
    moved = (group.storage["residual"] != residual) | (group.current != bf16)
    assert moved.float().mean() > 0.4  # cautious leaves out what disagrees in sign; the first step has none of that


def test_lr_zero_changes_no_weight(tiny):
    config, folder, manifest = tiny(optimizer={"lr": 0.0})
    trainer = Trainer(config, folder, dataset=manifest)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    loss = trainer.evaluate()
    for _ in range(3):
        trainer.train_step()
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert trainer.evaluate() == loss


@pytest.mark.parametrize("kind", [{}, {"kind": "adan", "betas": (0.98, 0.92, 0.99)}])
@pytest.mark.parametrize("precision", WEIGHT_PRECISIONS)
@pytest.mark.parametrize("state_format", STATE_FORMATS)
def test_resuming_continues_bit_for_bit(tiny, tmp_path, kind, precision, state_format):
    optimizer = {**kind, "weight_precision": precision, "state_format": state_format}
    recipe = {"lr_schedule": "cosine", "warmup_steps": 3, "schedule_steps": 15, "caption_dropout": 0.3}
    recipe["ema_decay"] = 0.9 if kind else 0.0  # with an average, and without
    straight = trained(tiny, 8, "straight", optimizer=optimizer, recipe=recipe)
    first = trained(tiny, 4, "first", optimizer=optimizer, recipe=recipe, memory={"blocks_to_swap": 1})
    state = tmp_path / "state"
    state.mkdir()
    first.save(state)
    config, folder, manifest = tiny(name="second", optimizer=optimizer, recipe=recipe)
    second = Trainer(config, folder, dataset=manifest)
    second.load(state)
    assert second.step == 4
    for _ in range(4):
        second.train_step()
    assert_same(contents(straight), contents(second))


def test_a_state_of_another_optimizer_is_refused_before_anything_changes(tiny, tmp_path):
    adan = trained(tiny, 1, "adan", optimizer={"kind": "adan", "betas": (0.98, 0.92, 0.99)})
    state = tmp_path / "state"
    state.mkdir()
    adan.save(state)
    other = trained(tiny, 1, "nadam")
    before = contents(other)
    with pytest.raises(ValueError, match="another optimizer"):
        other.load(state)
    assert_same(before, contents(other))


def test_parking_changes_nothing(tiny):
    straight = trained(tiny, 4, "straight")
    parked = trained(tiny, 2, "parked", memory={"blocks_to_swap": 1})
    parked.park()
    parked.train_step()
    parked.park()
    parked.train_step()
    assert_same(contents(straight), contents(parked))


def test_a_loss_that_is_no_number_stops_before_any_weight_changes(tiny):
    config, folder, manifest = tiny()
    trainer = Trainer(config, folder, dataset=manifest)
    trainer.train_step()
    before = contents(trainer)
    latents = trainer.data.latents
    trainer.data.latents = lambda *samples: latents(*samples) * float("nan")
    with pytest.raises(NonFiniteLoss, match=r"loss of step 2 .*\.png"):
        trainer.train_step()
    assert_same(before, contents(trainer))
    assert trainer.step == 1 and not trainer.torn


def test_a_fault_in_the_middle_of_a_step_marks_the_state_as_torn(tiny, tmp_path):
    config, folder, manifest = tiny()
    trainer = Trainer(config, folder, dataset=manifest)

    def fail(**_):
        raise RuntimeError("out of memory")

    trainer.stages[1].arena.update = fail
    with pytest.raises(RuntimeError):
        trainer.train_step()
    assert trainer.updated == ["final_layer", "single_blocks.0"]
    with pytest.raises(AssertionError):
        trainer.save(tmp_path)


def test_prediction_equals_the_module_and_repeats_bit_for_bit(tiny):
    config, folder, manifest = tiny(memory={"blocks_to_swap": 1})
    trainer = Trainer(config, folder, dataset=manifest)
    x = torch.randn(2, 16, 7, 9, generator=torch.Generator().manual_seed(3))
    context, pooled = trainer.data.captions([0, 1], [False, False])
    t, g = torch.tensor([0.3, 0.8]), torch.tensor([3.5, 3.5])
    for guidance in (g, None):
        with torch.no_grad():
            expected = trainer.model(x, t, context, pooled, guidance)
        got = trainer.predict(x, t, context, pooled, guidance)
        assert got.shape == x.shape
        assert torch.allclose(got, expected, atol=1e-6)
        assert torch.equal(got, trainer.predict(x, t, context, pooled, guidance))


def test_an_f32_export_is_the_exact_master(tiny):
    from trainer.optim.base import master

    trainer = trained(tiny, 3, optimizer={"weight_precision": "split", "lr": 1e-4})
    exported = {e.name: torch.cat([c.flatten() for c in e.chunks()]).view(e.shape) for e in trainer.entries("f32")}
    assert exported.keys() == dict(trainer.model.named_parameters()).keys()
    for stage in trainer.stages:
        for group in stage.arena.groups:
            exact = master(group.current, group.storage)
            for piece in group.pieces:
                assert torch.equal(exported[piece.name], piece.view(exact)), piece.name
                if group.dtype == torch.bfloat16:
                    # The bf16 weight is the master's nearest (at a tie, either of the two).
                    value, trained_as = exported[piece.name], piece.parameter.data.float()
                    assert torch.equal((value - trained_as).abs(), (value - value.bfloat16().float()).abs()), piece.name


def test_weights_of_a_finer_file_keep_every_bit(tiny):
    """A float32 file under bf16 weights: the masters are the file's numbers."""
    config, folder, manifest = tiny(optimizer={"weight_precision": "split"})
    from safetensors.torch import load_file

    file = load_file(config.model.flux)
    exported = {
        e.name: torch.cat([c.flatten() for c in e.chunks()]).view(e.shape)
        for e in Trainer(config, folder, dataset=manifest).entries("f32")
    }
    assert all(torch.equal(exported[n], t) for n, t in file.items())


def test_f16_export_out_of_range_is_refused(tiny, tmp_path):
    config, folder, manifest = tiny()
    trainer = Trainer(config, folder, dataset=manifest)
    with torch.no_grad():
        trainer.model.img_in.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="img_in.*float16"):
        write_safetensors(tmp_path / "out.safetensors", trainer.entries("f16"), {})
    assert not list(tmp_path.glob("out*"))


def test_a_gradient_that_is_not_finite_leaves_its_tensors_untouched_and_is_told(tiny):
    config, folder, manifest = tiny()
    trainer = Trainer(config, folder, dataset=manifest)
    trainer.train_step()
    before, take = contents(trainer), trainer.stages[1].arena.take_gradients
    trainer.stages[1].arena.take_gradients = lambda g, add: take([g[0] * float("inf"), *g[1:]], add=add)
    report = trainer.train_step()
    assert report.not_finite == ("double_blocks.0",)
    after = contents(trainer)
    same = {name for name in after if torch.equal(after[name], before[name])}
    poisoned = trainer.stages[1].arena.groups[0].label
    assert same == {name for name in after if name.startswith(f"double_blocks.0.{poisoned}.")}


def test_noise_never_repeats_after_a_rollback(tiny):
    config, folder, manifest = tiny()
    first = Trainer(config, folder, dataset=manifest).train_step()
    again = Trainer(config, folder, dataset=manifest).train_step()
    rolled = Trainer(config, folder, dataset=manifest, rollbacks=1).train_step()
    assert first.loss == again.loss and first.timesteps == again.timesteps
    assert set(first.timesteps).isdisjoint(rolled.timesteps)


def test_loss_falls(tiny):
    config, folder, manifest = tiny(recipe={"timestep_sampling": "uniform"})
    trainer = Trainer(config, folder, dataset=manifest)
    before = trainer.evaluate()
    for _ in range(60):
        trainer.train_step()
    assert trainer.evaluate() < 0.9 * before


def test_noise_goes_on_from_that_of_the_run_whose_export_this_one_began_with(tiny):
    """A parent's 40 steps and a child's do not share a noise level; without a parent nothing changes."""
    config, folder, manifest = tiny(recipe={"timestep_sampling": "uniform"})
    info = require_flux(config.model.flux)
    seen = []
    for parent_steps in (0, 40):
        child = Trainer(config, folder, dataset=manifest, info=replace(info, parent_steps=parent_steps))
        reports = [child.train_step() for _ in range(2)]
        seen.append([r.timesteps for r in reports])
        assert child.step == 2
        for r in reports:
            counters = [(0, 0, parent_steps + r.step, i) for i in r.samples]
            expected = [flow.timestep(config.recipe, child.data.shapes[c[-1]], *c) for c in counters]
            assert r.timesteps == tuple(expected)
    assert {t for r in seen[0] for t in r}.isdisjoint(t for r in seen[1] for t in r)


def test_usage_tells_of_the_steps_since(tiny):
    config, folder, manifest = tiny()
    trainer = Trainer(config, folder, dataset=manifest)
    trainer.train_step()
    found = trainer.usage()
    assert found == {"vram_gb": 0.0, "ram_gb": ANY, "waits": {"up": 0.0, "down": 0.0}, "waits_for": "arithmetic"}
    assert 0 < found["ram_gb"] < 64

    class Waiting(Streams):
        def waited(self):
            return {"up": 3.0, "down": 1.0}

    trainer.conveyor.streams = Waiting()
    trainer.step, trainer.seconds = 5, trainer.seconds + 20.0
    assert trainer.usage()["waits"] == {"up": 0.75, "down": 0.25}
    trainer.step, trainer.seconds = 6, trainer.seconds + 20.0
    assert trainer.usage()["waits_for"] == "up"
    trainer.step, trainer.seconds = 7, trainer.seconds + 200.0
    assert trainer.usage()["waits_for"] == "arithmetic"

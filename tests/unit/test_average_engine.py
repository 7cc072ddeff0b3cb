"""The running average of the weights through all that an engine does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_streams import FakeStreams
from states import KINDS, assert_same, contents

from trainer.loop import Trainer
from trainer.memory import conveyor
from trainer.optim.average import decay_at
from trainer.saves import masters


def make(tiny, name: str, streams=None, *, decay: float = 0.99, optimizer: dict | None = None, **memory) -> Trainer:
    config, folder, manifest = tiny(
        name=name, optimizer={"weight_precision": "split", **(optimizer or {})}, recipe={"ema_decay": decay},
        memory=memory,
    )  # fmt: skip
    return Trainer(config, folder, dataset=manifest, streams=streams)


def tensors(entries) -> dict[str, torch.Tensor]:
    return {e.name: torch.cat([c.flatten() for c in e.chunks()]).view(e.shape) for e in entries}


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_every_engine_has_one_and_it_is_the_average_of_its_weights(tiny, settings) -> None:
    trainer = make(tiny, "run", optimizer={"lr": 1e-3, **settings})
    reference = {n: t.double() for n, t in tensors(trainer.entries("f32")).items()}
    assert_same(tensors(trainer.entries("f32")), tensors(trainer.entries("f32", ema=True)))
    start = dict(reference)
    for step in range(1, 6):
        trainer.train_step()
        d = decay_at(0.99, step)
        now = tensors(trainer.entries("f32"))
        reference = {n: d * t + (1 - d) * now[n].double() for n, t in reference.items()}
    found = tensors(trainer.entries("f32", ema=True))
    for name, t in reference.items():
        moved = float((now[name].double() - start[name]).abs().max())
        assert moved > 0 and float((found[name].double() - t).abs().max()) < 0.002 * moved + 1e-7, name
        assert not torch.equal(found[name], now[name]), name


@pytest.mark.parametrize(("swap", "offload"), [(0, "off"), (1, "on"), (2, "off")])
def test_streaming_and_chunks_change_no_bit(tiny, monkeypatch, swap, offload) -> None:
    def run(trainer: Trainer) -> dict[str, torch.Tensor]:
        for step in range(4):
            trainer.train_step()
            if step == 1:
                trainer.predict(*given(trainer), ema=True)
            if step == 2:
                trainer.park()
        return contents(trainer)

    plain = run(make(tiny, "plain"))
    monkeypatch.setattr("trainer.memory.arena.CHUNK", 1 << 15)
    monkeypatch.setattr(conveyor, "RING_BYTES", 1 << 20)
    moved = make(tiny, "moved", FakeStreams(), blocks_to_swap=swap, activation_offload=offload)
    assert_same(plain, run(moved))


def given(trainer: Trainer):
    x = torch.randn(2, 16, 7, 9, generator=torch.Generator().manual_seed(3))
    context, pooled = trainer.data.captions([0, 1], [False, False])
    return x, torch.tensor([0.3, 0.8]), context, pooled, torch.tensor([3.5, 3.5])


@pytest.mark.parametrize(
    ("fake", "swap", "precision"),
    [(False, 0, "split"), (False, 1, "f32"), (True, 0, "f32"), (True, 1, "split"), (True, 2, "stochastic")],
)
def test_a_prediction_with_the_average_is_that_of_a_model_that_has_it(tiny, monkeypatch, fake, swap, precision) -> None:
    if fake:
        monkeypatch.setattr("trainer.memory.arena.CHUNK", 1 << 15)
    streams = FakeStreams() if fake else None
    trainer = make(tiny, "run", streams, optimizer={"weight_precision": precision, "lr": 3e-3}, blocks_to_swap=swap)
    for _ in range(3):
        trainer.train_step()
    before = contents(trainer)
    plain = trainer.predict(*given(trainer))
    found = trainer.predict(*given(trainer), ema=True)
    assert torch.equal(found, trainer.predict(*given(trainer), ema=True))
    assert torch.equal(plain, trainer.predict(*given(trainer))) and not torch.equal(plain, found)
    assert_same(before, contents(trainer))
    average = tensors(trainer.entries("f32", ema=True))
    trainer.park()
    for name, p in trainer.model.named_parameters():
        p.data = average[name].to(p.dtype)
    with torch.no_grad():
        expected = trainer.model(*given(trainer)).float()
    assert torch.allclose(found, expected, atol=1e-6 if precision == "f32" else 2e-2, rtol=1e-3)
    assert (found - expected).norm() < 0.2 * (found - plain).norm()


def test_a_prediction_that_fails_in_the_middle_leaves_the_weights_in_place(tiny) -> None:
    trainer = make(tiny, "run", FakeStreams(), blocks_to_swap=1)
    trainer.train_step()
    before, run = contents(trainer), trainer.stages[2].run

    def fail(*_):
        raise RuntimeError("out of memory")

    trainer.stages[2].run = fail
    with pytest.raises(RuntimeError):
        trainer.predict(*given(trainer), ema=True)
    trainer.stages[2].run = run
    assert_same(before, contents(trainer))
    for stage in trainer.stages:
        for group in stage.arena.groups:
            for piece in group.pieces:
                assert torch.equal(piece.parameter.data, piece.view(group.current))
    trainer.train_step()


@pytest.mark.parametrize("settings", KINDS[:4], ids=lambda s: s["weight_precision"])
def test_resuming_continues_it_bit_for_bit_and_files_tell_it(tiny, tmp_path, settings) -> None:
    straight, first = (make(tiny, name, optimizer=settings) for name in ("straight", "first"))
    for _ in range(3):
        first.train_step()
    (state := tmp_path / "state").mkdir()
    first.save(state)
    second = make(tiny, "second", optimizer=settings, blocks_to_swap=1)
    second.load(state)
    for _ in range(4):
        straight.train_step()
    second.train_step()
    assert_same(contents(straight), contents(second))
    for ema in (False, True):
        assert_same(tensors(first.entries("f32", ema=ema)), tensors(masters.saved_entries(state, "f32", ema=ema)))


def test_it_may_begin_and_end_on_the_way(tiny, tmp_path) -> None:
    without, kept = make(tiny, "without", decay=0.0), make(tiny, "with")
    for trainer in (without, kept):
        trainer.train_step()
        (tmp_path / f"state-{trainer.config.name}").mkdir()
        trainer.save(tmp_path / f"state-{trainer.config.name}")
    with pytest.raises(ValueError, match="ema_decay"):
        without.entries("f32", ema=True)
    with pytest.raises(ValueError, match="ema_decay"):
        without.predict(*given(without), ema=True)
    with pytest.raises(ValueError, match="no average"):
        masters.saved_entries(tmp_path / "state-without", "f32", ema=True)
    kept.load(tmp_path / "state-without")
    assert_same(tensors(kept.entries("f32")), tensors(kept.entries("f32", ema=True)))
    without.load(tmp_path / "state-with")
    assert without.train_step().loss == kept.train_step().loss


def test_switching_it_on_needs_another_engine_and_another_decay_does_not(tiny) -> None:
    config, folder, manifest = tiny(recipe={"ema_decay": 0.99})
    trainer = Trainer(config, folder, dataset=manifest)
    slower = replace(config, recipe=replace(config.recipe, ema_decay=0.999))
    assert trainer.reconfigure(slower, manifest)
    assert {g.spec.ema_decay for s in trainer.stages for g in s.arena.groups} == {0.999}
    assert not trainer.reconfigure(replace(config, recipe=replace(config.recipe, ema_decay=0.0)), manifest)

"""The order between the streams, proven without a GPU: late copies, poisoned memory, vector clocks."""

from dataclasses import replace

import pytest
import torch
from fake_streams import FakeStreams
from states import assert_same, contents

from trainer.data.order import Order
from trainer.flux.model import TINY, FluxParams
from trainer.loop import Trainer
from trainer.memory import conveyor
from trainer.memory.streams import COMPUTE, DOWN, UP, Buffer
from trainer.optim import base, tile

DEPTHS = {"depth": 2, "depth_single_blocks": 4}
STEPS = 4


def make(tiny, name: str, streams=None, *, swap: int = 5, offload: str = "on", **settings) -> Trainer:
    config, folder, manifest = tiny(
        name=name,
        params=FluxParams(**{**TINY.__dict__, **DEPTHS}),
        optimizer={"weight_precision": "split", **settings},
        memory={"blocks_to_swap": swap, "activation_offload": offload, "micro_batch": 2},
    )
    return Trainer(config, folder, dataset=manifest, streams=streams)


def run(trainer: Trainer, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Steps with everything between them that a run does: predictions, evaluations, parking."""
    for step in range(steps):
        trainer.train_step()
        if step == 1:
            trainer.evaluate()
        if step == 2:
            trainer.park()
    return contents(trainer)


@pytest.fixture
def small_ring(monkeypatch):
    """Chunks and ring so small that every slot is used again within one block."""
    monkeypatch.setattr("trainer.memory.arena.CHUNK", 1 << 15)
    monkeypatch.setattr(conveyor, "RING_BYTES", 1 << 20)


@pytest.fixture
def plain(tiny, small_ring):
    return run(make(tiny, "plain", swap=0, offload="off"))


@pytest.mark.parametrize("swap", [0, 1, 3, 6])
@pytest.mark.parametrize("offload", ["on", "off"])
def test_the_whole_run_under_the_latest_possible_copies(tiny, plain, swap, offload):
    streams = FakeStreams()
    assert_same(plain, run(make(tiny, "fake", streams, swap=swap, offload=offload)))


def without_compute_between(streams: FakeStreams) -> None:
    """A step never writes home what compute has not waited for; a caller of the streams may."""
    home, here, fresh = (Buffer({"x": torch.full((4,), value)}) for value in (1.0, 0.0, 2.0))
    with streams.use(UP, reads=[home], writes=[here]):
        streams.copy(UP, here["x"], home["x"])
    with streams.use(COMPUTE, writes=[fresh]):
        pass
    with streams.use(DOWN, reads=[fresh], writes=[home]):
        streams.copy(DOWN, home["x"], fresh["x"])
    with streams.use(COMPUTE, reads=[here]):
        assert here["x"].tolist() == [1.0] * 4
    streams.synchronize()
    assert home["x"].tolist() == [2.0] * 4


def test_every_wait_is_needed(tiny, plain):
    streams = FakeStreams()
    run(make(tiny, "all", streams))
    assert len(streams.kinds) >= 6, streams.kinds
    without_compute_between(streams)
    needless = []
    for number, kind in enumerate(sorted(streams.kinds)):
        try:
            without_compute_between(FakeStreams(without=kind))
            result = run(make(tiny, f"without{number}", FakeStreams(without=kind)))
            if all(torch.equal(plain[n], result[n]) for n in plain):
                needless.append(kind)
        except (AssertionError, ValueError):  # a race, other numbers, or a loss that is not a number
            continue
    assert not needless, f"nothing failed without these waits: {needless}"


@pytest.mark.parametrize("place", ["copy", "step", "pack"])
@pytest.mark.parametrize("moment", [3, 20, 60])
def test_a_fault_leaves_every_stage_all_old_or_all_new(tiny, small_ring, monkeypatch, place, moment):
    """Whatever fails, and whenever: each stage's weights and states are of one step, and the run says which."""
    old, new = make(tiny, "old"), make(tiny, "new")
    for trainer in (old, new):
        trainer.train_step()
    new.train_step()
    before, after = contents(old), contents(new)

    streams = FakeStreams()
    victim = make(tiny, "victim", streams)
    victim.train_step()
    calls = 0

    def failing(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise MemoryError("injected")
            return real(*args, **kwargs)

        return call

    if place == "copy":
        monkeypatch.setattr(streams, "copy", failing(streams.copy))
    elif place == "step":
        monkeypatch.setattr("trainer.memory.arena.update_chunk_", failing(base.update_chunk_))
    else:
        monkeypatch.setattr(tile, "split_", failing(tile.split_))
    with pytest.raises(MemoryError):
        victim.train_step()
    monkeypatch.undo()
    victim.park()
    state = contents(victim)
    for stage in victim.stages:
        want = after if stage.name in victim.updated else before
        names = [n for n in state if n.startswith(f"{stage.name}.")]
        assert names
        for name in names:
            assert torch.equal(state[name], want[name]), f"{name}, updated: {victim.updated}"
    victim.updated = []
    victim.train_step()  # and it can go on


def test_inputs_of_ever_larger_pictures_leave_nothing_behind(tiny, small_ring):
    """What was kept for smaller ones is let go of, but never while something is copied with it."""
    shapes = [(4, 4)] * 3 + [(8, 4)] * 3 + [(8, 8)] * 3 + [(12, 12)] * 3
    order = [0, 3, 6, 9]
    seed = next(s for s in range(1000) if [min(Order(shapes, 3, s).batch(i)) for i in (1, 2, 3, 4)] == order)
    settings = {"shapes": shapes, "optimizer": {"weight_precision": "split"}, "recipe": {"training_seed": seed}}
    config, folder, manifest = tiny(name="plain", **settings)
    plain = Trainer(config, folder, dataset=manifest)
    streams, gone = FakeStreams(), []
    let_go = streams.let_go
    streams.let_go = lambda buffer: (gone.append(buffer), let_go(buffer))
    memory = {"blocks_to_swap": 2, "activation_offload": "on", "micro_batch": 1}
    config, folder, manifest = tiny(name="fake", memory=memory, **settings)
    fake = Trainer(config, folder, dataset=manifest, streams=streams)
    for _ in range(5):
        plain.plan = replace(plain.plan, micro_batch=1)
        plain.train_step()
        fake.train_step()
    assert_same(contents(plain), contents(fake))
    sizes = {shape for shape, spare in fake.conveyor.host._spare.items() if spare and shape[0][0] == "bytes"}
    assert gone and len(sizes) == 1

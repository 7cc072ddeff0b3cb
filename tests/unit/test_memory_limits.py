"""When the GPU's memory runs out: tried out before, told after, and the training goes on."""

import dataclasses

import pytest
import torch
import workers
from fake_streams import FakeStreams
from sessions import session
from states import contents

from trainer.config import OptimizerConfig
from trainer.flux.model import TINY, FluxParams
from trainer.live.session import Session
from trainer.loop import Trainer
from trainer.memory import plan as planning
from trainer.memory.plan import Plan, tighter

DEEP = FluxParams(**{**TINY.__dict__, "depth": 2, "depth_single_blocks": 4})
OUT = torch.cuda.OutOfMemoryError


def make(tiny, streams=None, **settings) -> Trainer:
    config, folder, manifest = tiny(params=DEEP, optimizer={"weight_precision": "split"}, **settings)
    return Trainer(config, folder, dataset=manifest, streams=streams)


def fail_at(trainer: Trainer, stage: str, times: int = 1):
    """Have the update of ``stage`` run out of memory, so often."""
    arena = next(s.arena for s in trainer.stages if s.name == stage)
    real, left = arena.update, times

    def update(**settings):
        nonlocal left
        if left:
            left -= 1
            raise OUT("CUDA out of memory. Tried to allocate 1.00 GiB")
        real(**settings)

    arena.update = update


@pytest.mark.parametrize("fake", [False, True])
def test_warming_up_changes_nothing(tiny, fake):
    streams = (FakeStreams(),) if fake else (None,)
    warmed = make(tiny, *streams, name="warmed", memory={"blocks_to_swap": 3})
    plain = make(tiny, name="plain")
    before = contents(warmed)
    warmed.warm_up()
    assert all(torch.equal(t, before[n]) for n, t in contents(warmed).items())
    assert not warmed.torn and warmed.step == 0
    for _ in range(2):
        warmed.train_step()
        plain.train_step()
    warmed.warm_up()
    assert all(torch.equal(t, contents(plain)[n]) for n, t in contents(warmed).items())


def test_a_compiler_that_fails_is_told_and_updates_are_eager_from_then_on(tiny, monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no working compiler\nhere")

    monkeypatch.setattr("trainer.engine.eager_because", lambda device: "")
    monkeypatch.setattr("trainer.optim.compiled.update_tile", broken)
    with caplog.at_level("INFO"):
        trainer = make(tiny, name="compiled")
        assert trainer.compiled() and "updates: compiled" in caplog.text
        trainer.warm_up()
    assert not trainer.compiled() and "no working compiler here" in caplog.text
    monkeypatch.undo()
    plain = make(tiny, name="plain")
    for one in (trainer, plain):
        one.train_step()
    assert all(torch.equal(t, contents(plain)[n]) for n, t in contents(trainer).items())


def test_it_warms_up_on_the_largest_pictures(tiny):
    trainer = make(tiny, shapes=[(4, 4), (16, 12), (4, 4), (12, 8)])
    seen = []
    latents = trainer.data.latents
    trainer.data.latents = lambda indices, *rest: seen.append(indices) or latents(indices, *rest)
    trainer.warm_up()
    assert seen == [[1, 1, 1]]


def test_the_next_steps_under_a_tighter_plan_are_those_of_the_looser_one(tiny):
    """Residency changes in a living engine, and no bit with it."""
    plain, tightened = make(tiny, name="plain"), make(tiny, FakeStreams(), name="tightened")
    for trainer in (plain, tightened):
        trainer.train_step()
    for expected in (2, 4, 6):
        assert tightened.tighten() and tightened.plan.blocks_to_swap == expected
        assert tightened.plan.activation_offload and tightened.keeper.offload
        assert [s.arena.resident for s in tightened.stages[1:-1]] == [i >= expected for i in range(6)]
        for trainer in (plain, tightened):
            trainer.train_step()
        assert all(torch.equal(t, contents(plain)[n]) for n, t in contents(tightened).items())
    assert tightened.step == plain.step == 4
    assert tightened.tighten() and tightened.plan.micro_batch == 1
    assert not tightened.tighten()


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_torn_engine_goes_back_to_a_save_point_under_the_tighter_plan(tiny, tmp_path, ema):
    recipe = {"ema_decay": ema}
    plain, torn = make(tiny, name="plain", recipe=recipe), make(tiny, FakeStreams(), name="torn", recipe=recipe)
    for trainer in (plain, torn):
        trainer.train_step()
    (state := tmp_path / "state").mkdir()
    torn.save(state)
    fail_at(torn, "single_blocks.1")
    with pytest.raises(OUT):
        torn.train_step()
    assert torn.torn and torn.keeper._stack  # inputs that nobody has come back for
    torn.load(state)
    assert not torn.torn and not torn.keeper._stack and torn.step == 1
    assert torn.tighten() and torn.step == 1 and torn.plan.blocks_to_swap == 2
    for trainer in (plain, torn):
        trainer.train_step()
    assert all(torch.equal(t, contents(plain)[n]) for n, t in contents(torn).items())


def test_a_plan_is_tightened_within_the_ram(monkeypatch):
    first = Plan(device="cuda:0", blocks_to_swap=10, activation_offload=False, micro_batch=0, fits=True, vram_gb=30,
                 ram_gb=100, blocks=57, pictures=5)  # fmt: skip

    def resolved(blocks_to_swap, activation_offload, micro_batch):
        on = activation_offload == "on"
        return dataclasses.replace(first, blocks_to_swap=blocks_to_swap, activation_offload=on, micro_batch=micro_batch,
                                   enough_ram=not on)  # fmt: skip

    plans = [first]
    while (found := tighter(plans[-1], resolved)) is not None:
        plans.append(found)
    assert all(not p.activation_offload for p in plans)
    assert [p.blocks_to_swap for p in plans[:4]] == [10, 17, 24, 31]
    assert [p.micro_batch for p in plans[-2:]] == [2, 1] and plans[-1].blocks_to_swap == 57


def deep(tiny) -> tuple[Session, list[dict]]:
    """A run in training, and what it tells from now on."""
    told: list[dict] = []
    return session(workers.make(tiny, params=DEEP), told), told


def test_running_out_while_trying_costs_nothing(tiny):
    one, told = deep(tiny)
    one._fitting._tried = False
    fail_at(one.trainer, "single_blocks.2")
    assert one.step() == 1
    (event,) = [e for e in told if e["type"] == "out_of_memory"]
    assert (event["step"], event["updated"], event["stages"]) == (0, 0, 8)
    assert event["plan"]["blocks_to_swap"] == 2 and one.run.status()["step"] == 1


def test_running_out_in_the_middle_is_told_and_training_goes_on_with_the_next_batch(tiny):
    one, told = deep(tiny)
    assert one.step() == 1
    before = contents(one.trainer)
    fail_at(one.trainer, "single_blocks.2")
    assert one.step() == 2
    (event,) = [e for e in told if e["type"] == "out_of_memory"]
    assert (event["step"], event["updated"], event["stages"]) == (2, 2, 8)  # the last layer and the last block
    after = contents(one.trainer)
    changed = {name.rsplit(".", 3)[0] for name in after if not torch.equal(after[name], before[name])}
    assert {name.partition(".float32")[0] for name in changed} == {"final_layer", "single_blocks.3"}
    assert one.run.status()["step"] == 2
    (cut,) = [e for e in told if e["type"] == "step" and "partial" in e]
    assert (cut["step"], cut["partial"]) == (2, [2, 8]) and cut["seconds"] > 0
    assert one.run.events()[-1]["type"] == "step" and one.run.losses()[-1] == (2, cut["loss"])
    whole, folder, manifest = tiny(name="whole", params=DEEP)
    other = Trainer(whole, folder, dataset=manifest)
    assert [r.loss for r in (other.train_step(), other.train_step())] == [loss for _, loss in one.run.losses()]
    assert one.step() == 3 and one.run.status()["step"] == 3 and [s for s, _ in one.run.losses()] == [1, 2, 3]
    assert one.save() == 3


def test_the_plan_is_made_once_kept_and_made_anew_for_other_settings(tiny):
    one, told = deep(tiny)
    (event,) = [e for e in told if e["type"] == "planned"]
    assert planning.from_dict(event["plan"]) == one.trainer.plan
    fail_at(one.trainer, "single_blocks.2")
    one.step()
    tight = one.trainer.plan
    again = Session(one.run)
    again.use(again.load())
    assert again.trainer.plan == tight
    memory = dataclasses.replace(one.run.config.memory, micro_batch=1)
    one.run.update(dataclasses.replace(one.run.config, memory=memory), one.run.dataset)
    again.use(again.load())
    assert again.trainer.plan.micro_batch == 1 and again.trainer.plan.blocks_to_swap == 0


def test_a_model_that_fits_in_no_way_is_a_users_error(tiny):
    one, told = deep(tiny)
    one._fitting._tried = False
    fail_at(one.trainer, "final_layer", times=100)
    with pytest.raises(ValueError, match="batch_size"):
        one.step()
    assert len([e for e in told if e["type"] == "out_of_memory"]) >= 4 and not one.trainer.torn
    assert OptimizerConfig().state_format == one.run.config.optimizer.state_format

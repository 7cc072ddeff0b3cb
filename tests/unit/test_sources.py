"""What a run goes on from: save points, checkpoints, weights alone; and how it is taken back to them."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from states import ADAN, SPLIT, contents, emptied, engine, exact, same
from workers import make

from trainer.config import OptimizerConfig
from trainer.loop import Trainer
from trainer.optim.base import load_master_, make_storage, master, spec_from_config, update_chunk_
from trainer.run import RunDirectory
from trainer.weights import DiskFull, entry, read_header, write_safetensors


@pytest.fixture
def trained(tiny):
    """A run with save points of steps 2 and 4, checkpoints of 1, 3 and 5, at step 5; and its engine."""
    run = make(tiny, **SPLIT)
    trainer = engine(run)
    for state in ("preparing", "training"):
        run.transition(state)
    with run.lock():
        for step in range(1, 6):
            trainer.train_step()
            run.append("step", step=step, loss=1.0, lr=1.0, seconds=1.0)
            if step % 2:
                run.write_checkpoint(step, trainer.entries("bf16"), {"modelspec.title": "t"})
            else:
                run.write_save_point(step, trainer.save, keep=2)
    return run, trainer


def moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: t for n, t in contents(trainer).items() if ".exp_avg" in n or "previous" in n}


# -- checkpoints


def test_a_checkpoint_is_a_plain_bf16_file_that_says_what_it_is(trained):
    run, trainer = trained
    assert [(c.step, c.path.name, c.fresh) for c in run.checkpoints()] == [
        (step, f"run-step-00000{step}.safetensors", True) for step in (1, 3, 5)]
    found = load_file(run.checkpoints()[-1].path)
    assert found.keys() == exact(trainer).keys()
    assert all(t.dtype == torch.bfloat16 and torch.equal(t, exact(trainer)[n].bfloat16()) for n, t in found.items())
    told = read_header(run.checkpoints()[-1].path).metadata
    assert told.pop("modelspec.hash_sha256").startswith("0x")
    assert told == {"modelspec.title": "t", "flux_fft.run": f"{run.uid}.0", "flux_fft.steps": "5"}


def test_the_newest_checkpoints_are_kept_and_what_is_not_ours_stays(trained, tmp_path):
    run, trainer = trained
    folder = run.path / "checkpoints"
    write_safetensors(folder / "mine-step-000001.safetensors", [entry("w", torch.zeros(1))])
    (folder / "run-step-000002.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("x")
    run.write_checkpoint(6, trainer.entries("bf16"), {}, keep=2)
    assert sorted(os.listdir(folder)) == ["mine-step-000001.safetensors", "notes.txt", "run-step-000002.safetensors",
                                          "run-step-000005.safetensors", "run-step-000006.safetensors"]
    run.write_checkpoint(5, trainer.entries("bf16"), {"about": "anew"}, keep=2)
    assert [c.step for c in run.checkpoints()] == [5, 6]
    assert read_header(run.checkpoints()[0].path).metadata["about"] == "anew"
    moved = tmp_path / "elsewhere"
    os.rename(run.path, moved)
    assert [c.step for c in RunDirectory(moved).checkpoints()] == [5, 6]  # a moved run still knows its own


def test_a_full_disk_takes_no_checkpoint_but_those_that_would_go_anyway(trained, monkeypatch):
    run, trainer = trained
    full = [True]

    def check(path, needed):
        if full[0] and len(run.checkpoints()) > 1:
            raise DiskFull("no room")

    monkeypatch.setattr("trainer.weights.check_space", check)
    for keep in (0, 4):
        with pytest.raises(DiskFull):
            run.write_checkpoint(6, trainer.entries("bf16"), {}, keep=keep)
        assert [c.step for c in run.checkpoints()] == [1, 3, 5]
    run.write_checkpoint(6, trainer.entries("bf16"), {}, keep=1)
    assert [c.step for c in run.checkpoints()] == [6]


def test_the_one_that_the_run_goes_on_from_is_never_removed(trained):
    run, trainer = trained
    with run.lock():
        run.take_back(run.find_source(5, fresh=True))
        for step in (6, 7, 8):
            run.write_checkpoint(step, trainer.entries("bf16"), {}, keep=1)
            assert [c.step for c in run.checkpoints()] == [5, step]
        trainer.step = 9
        run.write_save_point(9, trainer.save)
        run.write_checkpoint(10, trainer.entries("bf16"), {}, keep=1)
    assert [c.step for c in run.checkpoints()] == [10]


def test_half_a_checkpoint_is_cleared_away_by_the_next_start(trained):
    run, _ = trained
    half = run.path / "checkpoints" / "run-step-000009.safetensors.part"
    half.write_bytes(b"x" * 100)
    with run.lock():
        assert not half.exists() and len(run.checkpoints()) == 3


# -- fresh moments


@pytest.mark.parametrize("kind", [{}, {"nesterov": False, "cautious": False}, ADAN])
@pytest.mark.parametrize("precision", ["split", "f32"])
def test_moments_that_begin_anew_make_the_step_that_a_first_one_makes(kind, precision):
    config = OptimizerConfig(**{"lr": 1e-3, "state_format": "f32", "weight_precision": precision, **kind})
    dtype = torch.float32 if precision == "f32" else torch.bfloat16
    g = torch.Generator().manual_seed(0)
    value, grads = torch.randn(8192, generator=g), [torch.randn(8192, generator=g) for _ in range(3)]

    def after(since: int) -> torch.Tensor:
        spec = dataclasses.replace(spec_from_config(config, 0), since=since)
        weight, storage = torch.empty(8192, dtype=dtype), make_storage(spec, 8192, dtype)
        load_master_(weight, storage, value)
        for step, grad in enumerate(grads, since + 1):
            update_chunk_(spec, weight, grad, storage, lr=1e-3, step=step)
        return master(weight, storage)

    assert torch.equal(after(0), after(700))
    assert not torch.equal(after(0), value)


def test_the_counted_rounding_goes_on_with_the_run(tiny):
    """Else a run that begins its moments anew would round as at its beginning."""
    spec = spec_from_config(OptimizerConfig(weight_precision="stochastic", lr=1e-3), 0)
    value, grad = torch.randn(8192).bfloat16(), torch.randn(8192)

    def after(since: int) -> torch.Tensor:
        weight, storage = value.clone(), make_storage(spec, 8192, torch.bfloat16)
        update_chunk_(dataclasses.replace(spec, since=since), weight, grad, storage, lr=1e-3, step=since + 1)
        return weight

    assert not torch.equal(after(0), after(700))


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_run_goes_on_from_its_weights_with_moments_of_zero(trained, checkpoint):
    run, _ = trained
    step = 5 if checkpoint else 4
    before = emptied(run)
    with run.lock():
        if checkpoint:
            kept = {n: t.float() for n, t in load_file(run.checkpoints()[-1].path).items()}
        else:
            before.load(run.latest_save_point())
            kept = exact(before)
        source = run.find_source(step, fresh=True)
        run.take_back(source)
    assert source.fresh and run.source() == source and run.status()["resume_step"] == run.status()["step"] == step
    trainer = emptied(RunDirectory(run.path))
    with run.lock():
        assert run.resume(trainer.load) == source
    assert (trainer.step, trainer.since) == (step, step)
    found = exact(trainer)
    assert all(torch.equal(found[n], kept[n]) for n in kept) and found.keys() == kept.keys()
    assert all(not t.any() for t in moments(trainer).values()) and moments(trainer)
    trainer.train_step()
    # Moments of zero and bias corrections that count from there: every weight steps by about lr, as in a first step.
    steps = torch.cat([(exact(trainer)[n] - kept[n]).flatten().abs() for n in kept])
    lr = run.config.optimizer.lr
    assert steps.max() < 3 * lr and steps[steps > 0].median() > 0.3 * lr


def test_moments_begun_anew_are_resumed_bit_for_bit(trained):
    run, _ = trained
    with run.lock():
        run.take_back(run.find_source(5, fresh=True))
        straight = emptied(run)
        run.resume(straight.load)
        straight.rollbacks = run.rollbacks
        straight.train_step()
        run.write_save_point(6, straight.save)
        assert (run.source().step, run.source().fresh) == (6, False)
        straight.train_step(), straight.train_step()
        again = emptied(run)
        run.resume(again.load)
        again.rollbacks = run.rollbacks
    assert (again.step, again.since) == (6, 5)
    again.train_step(), again.train_step()
    assert same(contents(again), contents(straight))


def test_new_settings_keep_the_count_of_the_moments(trained):
    run, _ = trained
    trainer = emptied(run)
    trainer.load(dataclasses.replace(run.latest_save_point(), fresh=True))
    recipe = dataclasses.replace(run.config.recipe, loss="huber")
    assert trainer.reconfigure(dataclasses.replace(run.config, recipe=recipe), run.dataset)
    assert {g.spec.since for stage in trainer.stages for g in stage.arena.groups} == {trainer.since} == {4}


@pytest.mark.parametrize("optimizer", [
    {**ADAN, "weight_precision": "split"}, {"weight_precision": "f32", "state_format": "int8"},
    {"weight_precision": "stochastic", "state_format": "f24"},
])
def test_the_weights_of_any_optimizer_are_taken(trained, optimizer):
    run, _ = trained
    before = emptied(run)
    before.load(run.latest_save_point())
    run.update(dataclasses.replace(run.config, optimizer=OptimizerConfig(lr=1e-3, **optimizer)))
    with pytest.raises(ValueError, match="another optimizer"):
        emptied(run).load(run.latest_save_point())
    trainer = emptied(run)
    with run.lock():
        run.take_back(run.find_source(4, fresh=True))
        run.resume(trainer.load)
    unrounded = optimizer["weight_precision"] != "stochastic"
    for name, value in exact(before).items():
        small = trainer.model.get_parameter(name).dtype == torch.float32
        assert torch.equal(exact(trainer)[name], value if unrounded or small else value.bfloat16().float()), name
    trainer.train_step()
    assert trainer.step == 5


def test_the_weights_of_another_model_are_refused_before_anything_changes(trained, tiny):
    from trainer.flux.model import TINY

    run, _ = trained
    other = make(tiny, name="other", params=dataclasses.replace(TINY, depth=2), **SPLIT)
    trainer = emptied(other)
    before = contents(trainer)
    for source in (run.checkpoints()[-1], dataclasses.replace(run.latest_save_point(), fresh=True)):
        with pytest.raises(ValueError, match="do not fit this run") as caught:
            trainer.load(source)
        assert "\n" not in str(caught.value) and same(before, contents(trainer))


# -- going back


def test_going_back_removes_what_came_after_and_changes_the_noise(trained):
    run, _ = trained
    source = run.roll_back(2)
    assert (source.step, source.fresh) == (2, False) and [p.step for p in run.save_points()] == [2]
    assert (run.rollbacks, run.status()["state"], run.status()["step"]) == (1, "stopped", 2)
    assert run.losses() == [(1, 1.0), (2, 1.0)] and run.events()[-2]["type"] == "rolled_back"
    assert [c.step for c in run.checkpoints()] == [1, 3, 5]  # they are products, not the run's past
    trainer, first = emptied(run), emptied(run)
    for one in (trainer, first):
        one.load(run.source())
    trainer.rollbacks = run.rollbacks
    assert trainer.train_step().loss != first.train_step().loss


def test_what_there_is_to_go_back_to_is_told(trained):
    run, _ = trained
    for step, fresh, said in ((3, False, "of step 3 .* only a weights-only checkpoint.*--fresh-moments"),
                              (7, True, "no save point of step 7: it has 2, 4; checkpoints: 1, 3, 5"),
                              (7, False, "no save point of step 7")):
        with pytest.raises(ValueError, match=said) as caught:
            run.roll_back(step, fresh=fresh)
        assert "\n" not in str(caught.value)
    assert run.rollbacks == 0 and run.source().step == 4
    assert run.roll_back().step == 4 and run.rollbacks == 1
    assert run.roll_back(fresh=True) == dataclasses.replace(run.latest_save_point(), fresh=True)
    assert run.find_source(None, checkpoint=True).step == 5


def test_a_damaged_target_loses_nothing(trained):
    run, _ = trained
    path = run.path / "state" / "step-000002" / "embed.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="step-000002.* not as it was written"):
        run.roll_back(2)
    assert [p.step for p in run.save_points()] == [2, 4] and run.rollbacks == 0


def test_the_beginning_is_the_model_s_file_and_needs_it(trained):
    run, _ = trained
    flux = Path(run.config.model.flux)
    flux.rename(flux.with_suffix(".away"))
    with pytest.raises(ValueError, match="flux.safetensors is gone"):
        run.roll_back(0)
    assert len(run.save_points()) == 2
    flux.with_suffix(".away").rename(flux)
    assert run.roll_back(0) is None and run.source() is None and run.save_points() == []
    assert (run.status()["step"], run.status()["resume_step"], run.rollbacks) == (0, 0, 1)


@pytest.mark.parametrize("how, said", [(lambda p: os.truncate(p, 200_000), "cut short"), (os.unlink, "is gone")])
def test_a_checkpoint_that_is_gone_or_cut_gives_way_to_the_save_point_before(trained, caplog, how, said):
    run, _ = trained
    with run.lock():
        run.take_back(run.find_source(5, fresh=True))
        assert run.source().step == 5
        how(run.checkpoints()[-1].path)
        trainer = emptied(run)
        assert run.resume(trainer.load).step == trainer.step == 4 and trainer.since == 0
        assert run.source().step == 4 and "resume" not in run.facts() and said in caplog.text
        assert [e["step"] for e in run.events() if e["type"] == "damaged"] == [5]


@pytest.mark.parametrize("others", [True, False])
def test_a_save_point_whose_weights_alone_are_wanted_may_be_damaged_too(trained, others):
    run, _ = trained
    with run.lock():
        run.take_back(run.find_source(4 if others else 2, fresh=True))
        path = run.source().path / "embed.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        trainer = emptied(run)
        if others:
            assert run.resume(trainer.load).step == trainer.step == 2 and trainer.since == 0
            assert run.log.history().step == 2
            return
        with pytest.raises(ValueError, match="step-000002.*no other save point"):
            run.resume(trainer.load)
        assert os.listdir(run.path / "state") == ["step-000002"]


def test_a_checkpoint_that_is_gone_is_missed_where_nothing_else_is_left(trained):
    run, _ = trained
    with run.lock():
        run.take_back(run.find_source(1, fresh=True))
        assert run.save_points() == [] and run.source().step == 1
        run.checkpoints()[0].path.unlink()
        with pytest.raises(ValueError, match="run-step-000001.safetensors is gone; .*no other save point") as caught:
            run.resume(emptied(run).load)
        assert "\n" not in str(caught.value)


def test_batches_to_skip_and_the_reason_are_noted(trained):
    run, _ = trained
    with run.lock():
        run.take_back(run.source(), skip=9, why="bad numbers")
        run.take_back(run.source(), skip=7, why="bad numbers")
    assert run.skipped == (7, 9) and run.rollbacks == 2
    told = run.events()[-1]
    assert (told["type"], told["why"], told["skipped"], told["step"]) == ("rolled_back", "bad numbers", 7, 4)
    assert json.loads((run.path / "run.json").read_text())["skipped"] == [7, 9]
    run.roll_back(2)
    assert run.skipped == (7, 9)


def test_the_run_of_a_moved_directory_goes_on_from_its_checkpoint(trained, tmp_path):
    run, _ = trained
    run.roll_back(5, fresh=True)
    moved = tmp_path / "moved"
    os.rename(run.path, moved)
    again = RunDirectory(moved)
    assert again.source().step == 5 and again.source().path.is_relative_to(moved)

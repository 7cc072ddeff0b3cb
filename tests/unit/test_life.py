"""What a run does by its own rules, and by its user's will while it trains: bad numbers, too little memory, going back,
another learning rate, validation, checkpoints, spikes, and what a power cut would cost."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from workers import make, state_files, wait_for, wait_for_state

from trainer.data.batches import batch_indices, batch_number
from trainer.data.cache import Cache
from trainer.live import session as sessions
from trainer.live.session import Session
from trainer.loop import Trainer
from trainer.run import RunDirectory

SHAPES = [(8, 8)] * 6
PAIRS = {"shapes": SHAPES, "recipe": {"batch_size": 2}}
"""Three batches an epoch."""


def recipe(**values) -> dict:
    return {"shapes": SHAPES, "recipe": {"batch_size": 2, **values}}


def session(run: RunDirectory) -> Session:
    made = Session(run)
    made.begin()
    made.use(made.load())
    made.transition("training", target=100)
    return made


def poison(run: RunDirectory, *indices: int) -> None:
    """Make cached latents NaN, as a broken VAE would."""
    for index in indices:
        sample = run.dataset["samples"][index]
        Cache(run.path / "cache").write("latents", sample["latent"], torch.full((16, *sample["shape"]), float("nan")))


def events(run: RunDirectory, *kinds: str) -> list[dict]:
    return [e for e in run.events() if e["type"] in kinds]


def masters(one: Session) -> dict[str, torch.Tensor]:
    return {f"{s.name}.{g.label}": g.current.clone() for s in one.trainer.stages for g in s.arena.groups}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- batches that are left out


@pytest.mark.parametrize("skipped", [(), (1,), (3,), (3, 4), (1, 2, 3), (2, 5, 9), (7, 8)])
def test_a_batch_left_out_costs_no_other_and_repeats_none(skipped):
    numbers = [batch_number(step, skipped) for step in range(1, 15)]
    assert numbers == [n for n in range(1, 30) if n not in skipped][:14]


def test_what_was_trained_before_is_the_same_whatever_is_left_out_later():
    known = ()
    for failed_at in (5, 5, 9):
        before = [batch_number(step, known) for step in range(1, failed_at)]
        known = tuple(sorted((*known, batch_number(failed_at, known))))
        assert [batch_number(step, known) for step in range(1, failed_at)] == before


# -- bad numbers


def test_bad_numbers_roll_back_and_leave_the_batch_out(tiny, serve):
    twice = [(8, 8)] * 12  # so that no picture comes again
    run = make(tiny, **recipe(on_bad_numbers="roll back", save_every_steps=2) | {"shapes": twice})
    poison(run, batch_indices(twice, 2, 0, 3)[0])
    _, client = serve(run)
    client.train(4)
    assert wait_for_state(client, "finished")["step"] == 4
    (back,) = events(run, "rolled_back")
    assert (back["step"], back["why"], back["skipped"]) == (2, "bad numbers", 3)
    assert run.skipped == (3,) and run.rollbacks == 1
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4]
    client.stop()

    # The third and fourth steps are those of the fourth and fifth batch, with the noise of a run that went back.
    other = make(tiny, name="other", **recipe() | {"shapes": twice})
    one = session(other)
    one.step(), one.step()
    one.trainer.rollbacks, one.trainer.skipped = 1, (3,)
    one.step(), one.step()
    assert run.losses() == other.losses()
    again = Session(run)
    again.begin()
    assert same(masters(one), _loaded(again))
    assert again.trainer.skipped == (3,) and again.trainer.rollbacks == 1


def _loaded(one: Session) -> dict[str, torch.Tensor]:
    one.use(one.load())
    return masters(one)


def test_without_a_save_point_it_goes_back_to_the_models_weights(tiny, serve):
    run = make(tiny, **recipe(on_bad_numbers="roll back"))
    poison(run, batch_indices(SHAPES, 2, 0, 2)[1])
    _, client = serve(run)
    client.train(3)
    assert wait_for_state(client, "finished")["step"] == 3
    assert [(e["step"], e["skipped"]) for e in events(run, "rolled_back")] == [(0, 2)]
    other = make(tiny, name="other", **recipe())
    one = session(other)
    one.trainer.rollbacks, one.trainer.skipped = 1, (2,)
    for _ in range(3):
        one.step()
    assert run.losses() == other.losses()


def test_it_goes_back_three_times_in_a_row_at_most_and_further_when_told_to_go_on(tiny, serve):
    run = make(tiny, **recipe(on_bad_numbers="roll back"))
    poison(run, *range(6))
    _, client = serve(run)
    client.train(3)
    status = wait_for_state(client, "failed")
    assert "went back 3 times" in status["error"] and "\n" not in status["error"]
    assert len(events(run, "rolled_back")) == 3 and run.skipped == (1, 2, 3)
    client.train(3)
    wait_for(lambda: len(events(run, "rolled_back")) == 6)
    assert "went back 3 times" in wait_for_state(client, "failed")["error"]


def test_a_new_save_point_begins_the_count_anew(tiny):
    run = make(tiny, **recipe(on_bad_numbers="roll back"))
    one = session(run)
    one.step(), one.save()
    for number in (1, 2):
        one._bad_numbers("bad", 90 + number)
        assert one._tries() == number
    one.step(), one.save()
    assert one._tries() == 0
    one._bad_numbers("bad", 95)
    one.roll_back()  # the user's own
    assert one._tries() == 0


@pytest.mark.parametrize("policy", ["stop", "roll back"])
def test_gradients_that_are_no_numbers_are_treated_alike(tiny, policy):
    run = make(tiny, **recipe(on_bad_numbers=policy))
    one = session(run)
    one.step(), one.save()
    before = masters(one)
    arena = one.trainer.stages[1].arena
    take = arena.take_gradients

    def infinite(g, add):
        arena.take_gradients = take
        take([g[0] * float("inf"), *g[1:]], add=add)

    arena.take_gradients = infinite
    if policy == "stop":
        with pytest.raises(ValueError, match=r"gradients of step 2 .*\.png at noise level"):
            one.step()
        assert events(run, "rolled_back") == [] and run.log.history().step == 2
    else:
        assert one.step() == 1 and same(masters(one), before)
        assert [s for s, _ in run.losses()] == [1] and run.skipped == (2,)


# -- too little memory


@pytest.mark.parametrize("policy, step", [("go on", 2), ("roll back", 1)])
def test_a_step_cut_short_by_memory_goes_on_or_back(tiny, policy, step):
    run = make(tiny, **recipe(on_out_of_memory=policy))
    one = session(run)
    one.step(), one.save()
    before = masters(one)
    arena, update = one.trainer.stages[1].arena, one.trainer.stages[1].arena.update

    def fail(**kwargs):
        arena.update = update
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    arena.update = fail
    one.trainer.tighten = _tightened(one.trainer)
    assert one.step() == step
    assert (events(run, "rolled_back") != []) == (policy == "roll back")
    assert same(masters(one), before) == (policy == "roll back")
    assert run.skipped == () and not one.trainer.torn
    if policy == "roll back":
        assert events(run, "rolled_back")[0]["why"] == "out of memory"
    assert one.step() == step + 1


def _tightened(trainer: Trainer):
    """On a CPU there is nothing to give up: what ``tighten`` does to the counters, at least."""

    def tighten() -> bool:
        trainer.park()
        if trainer.updated:
            trainer.step, trainer.updated = trainer.step + 1, []
        return True

    return tighten


# -- going back by the user's will


def test_going_back_in_a_living_worker(tiny, serve):
    run = make(tiny, **recipe(keep_save_points=3))
    _, client = serve(run)
    for target in (2, 4):
        client.train(target)
        wait_for_state(client, "finished")
    point = state_files(run.save_points()[0].path)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 6)
    with pytest.raises(ValueError, match=r"no save point of step 3"):
        client.roll_back(3)
    assert client.roll_back(2) == 2
    status = client.status()
    assert (status["state"], status["step"], status["save_point_step"], status["rollbacks"]) == ("paused", 2, 2, 1)
    assert [s for s, _ in run.losses()] == [1, 2] and status["unsaved_seconds"] == 0
    client.train(4)
    wait_for_state(client, "finished")
    first, again = (events(run, "step")[i]["loss"] for i in (2, -2))
    assert first != again, "a run that went back repeats no noise"
    assert client.roll_back(0) == 0 and run.save_points() == []
    client.train(2)
    wait_for_state(client, "finished")
    assert not all(torch.equal(a, b) for a, b in zip(
        point.values(), state_files(run.save_points()[0].path).values(), strict=True))


def test_a_step_that_cannot_be_gone_back_to_stops_no_training(tiny, serve):
    run = make(tiny, **PAIRS)
    _, client = serve(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    with pytest.raises(ValueError, match="no save point of step 77"):
        client.roll_back(77)
    at = client.status()["step"]
    wait_for(lambda: client.status()["step"] > at)
    assert client.status()["state"] == "training"


def test_fresh_moments_are_zero_and_the_weights_stay(tiny, serve):
    run = make(tiny, optimizer={"weight_precision": "split"}, **PAIRS)
    worker, client = serve(run)
    client.train(3)
    wait_for_state(client, "finished")
    before = masters(worker._session)
    assert client.roll_back(fresh=True) == 3
    one = worker._session
    assert same(masters(one), before) and one.trainer.since == 3
    moments = [t for s in one.trainer.stages for g in s.arena.groups for n, t in g.storage.items() if "exp_avg" in n]
    assert moments and not any(t.any() for t in moments)
    client.train(5)
    wait_for_state(client, "finished")
    client.stop()
    # Resumed from a save point that was made after it, the bias corrections still count from there.
    again = Session(run)
    again.begin()
    again.use(again.load())
    assert again.trainer.since == 3 and again.trainer.step == 5


def test_a_checkpoint_newer_than_the_save_point_is_gone_on_from_by_choice(tiny, serve):
    run = make(tiny, **recipe(checkpoint_every_steps=2))
    worker, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    client.train(10_000, pause_at=5)
    wait_for(lambda: client.status()["on_the_way"] == 5)
    assert [e["step"] for e in events(run, "checkpoint")] == [2, 4]
    with pytest.raises(ValueError, match="fresh"):
        client.roll_back(4)
    assert client.roll_back(4, fresh=True) == 4
    kept = load_file(run.checkpoints()[-1].path)
    names = {p.name: p.parameter for s in worker._session.trainer.stages for g in s.arena.groups for p in g.pieces}
    assert kept.keys() == names.keys()
    assert all(torch.equal(kept[name], names[name].detach().to(kept[name].dtype)) for name in kept)
    assert run.status()["resume_step"] == 4
    client.train(6)
    assert wait_for_state(client, "finished")["save_point_step"] == 6


# -- the learning rate


def test_a_learning_rate_is_taken_live_kept_and_superseded_by_the_settings(tiny, serve):
    run = make(tiny, **recipe(warmup_steps=0))
    _, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    client.set_lr(2e-4)
    client.train(3)
    assert wait_for_state(client, "finished")["lr"] == 2e-4
    (told,) = events(run, "lr")
    assert (told["step"], told["lr"]) == (2, 2e-4) and run.status()["lr_set"] == 2e-4
    client.stop()
    _, client = serve(run)
    client.train(4)
    assert wait_for_state(client, "finished")["lr"] == 2e-4

    def update(part: str, **values):
        config = run.config
        run.update(dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **values)}))

    update("recipe", save_every_steps=50)
    client.train(5)
    assert wait_for_state(client, "finished")["lr"] == 2e-4, "another setting does not touch it"
    update("optimizer", lr=5e-4)
    client.train(6)
    assert wait_for_state(client, "finished")["lr"] == 5e-4
    assert run.status()["lr_set"] is None


def test_a_live_learning_rate_is_as_one_in_the_settings(tiny):
    live, plain = (session(make(tiny, name=name, **PAIRS)) for name in ("live", "plain"))
    for one in (live, plain):
        one.step()
    live.set_lr(1e-4)
    plain.run.update(sessions.with_lr(plain.run.config, 1e-4))
    assert plain.take_description() and not live.described_anew
    for one in (live, plain):
        one.step(), one.step()
    assert same(masters(live), masters(plain)) and live.run.losses() == plain.run.losses()


@pytest.mark.parametrize("lr", [-1e-4, 1.5, float("nan"), "fast", None, True])
def test_what_is_no_learning_rate_is_refused_in_one_line(tiny, serve, lr):
    run = make(tiny, **PAIRS)
    _, client = serve(run)
    with pytest.raises(ValueError, match="learning rate is") as error:
        client.set_lr(lr)
    assert "\n" not in str(error.value) and events(run, "lr") == []


# -- what is measured and written on the way


def held_out(run: RunDirectory) -> RunDirectory:
    """The same run with its last two pictures set aside."""
    data = run.dataset
    run.update(run.config, {**data, "samples": data["samples"][:-2], "validation": data["samples"][-2:]})
    return run


def test_validation_at_its_interval_and_at_targets(tiny, serve):
    run = held_out(make(tiny, **recipe(validate_every_steps=2)))
    _, client = serve(run)
    client.train(5)
    wait_for_state(client, "finished")
    told = events(run, "validated")
    assert [e["step"] for e in told] == [0, 2, 4, 5] and len({e["loss"] for e in told}) == 4
    client.stop()
    assert run.status()["validation_loss"] == told[-1]["loss"]
    again = session(run)
    assert again.trainer.validate() == told[-1]["loss"], "noise and levels are fixed"
    again.roll_back(0)
    assert again.trainer.validate() == told[0]["loss"] == run.status()["validation_loss"]


def test_without_pictures_set_aside_nothing_is_validated(tiny):
    run = make(tiny, **recipe(validate_every_steps=1))
    one = session(run)
    one.step(), one.validate_once()
    assert events(run, "validated") == [] and run.status()["validation_loss"] is None


def test_checkpoints_are_made_and_kept_as_the_recipe_says_and_a_failure_costs_nothing_else(tiny, monkeypatch):
    run = make(tiny, **recipe(checkpoint_every_steps=2, keep_checkpoints=2))
    one = session(run)
    for _ in range(7):
        one.step()
    assert [e["step"] for e in events(run, "checkpoint")] == [2, 4, 6]
    assert [c.step for c in run.checkpoints()] == [4, 6]
    assert events(run, "checkpoint")[-1]["file"] == run.checkpoints()[-1].path.name
    weights = load_file(run.checkpoints()[-1].path)
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    monkeypatch.setattr(RunDirectory, "write_checkpoint", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    assert one.step() == 8 and one.step() == 9
    (failed,) = events(run, "checkpoint_failed")
    assert failed["step"] == 8 and "No space" in failed["error"]


def test_save_points_are_kept_as_the_recipe_says(tiny):
    run = make(tiny, **recipe(save_every_steps=1, keep_save_points=3))
    one = session(run)
    for _ in range(5):
        one.step()
    assert [p.step for p in run.save_points()] == [3, 4, 5]


def test_a_loss_that_jumps_is_told_and_the_run_goes_on(tiny, monkeypatch):
    run = make(tiny, **PAIRS)
    one = session(run)
    for _ in range(12):
        one.step()
    losses = [loss for _, loss in run.losses()]
    monkeypatch.setattr(Trainer, "_finite_loss", lambda *_: 50 * max(losses))
    assert one.step() == 13 and one.step() == 14
    (spike,) = events(run, "spike")
    assert spike["step"] == 13 and min(losses) <= spike["usual"] <= max(losses)


def test_what_a_power_cut_would_cost_is_known_to_all(tiny):
    run = make(tiny, **PAIRS)
    one = session(run)
    assert run.status()["unsaved_seconds"] == 0
    for _ in range(3):
        one.step()
    seconds = [e["seconds"] for e in events(run, "step")]
    assert RunDirectory(run.path).status()["unsaved_seconds"] == pytest.approx(sum(seconds), abs=2e-3)
    one.save()
    assert run.status()["unsaved_seconds"] == 0
    one.step()
    assert run.status()["unsaved_seconds"] == pytest.approx(events(run, "step")[-1]["seconds"], abs=2e-3)
    one.drop()
    one.begin()  # as after a crash
    assert run.status()["unsaved_seconds"] == 0


def test_images_and_epochs_are_counted(tiny):
    run = make(tiny, **PAIRS)
    one = session(run)
    for _ in range(4):
        one.step()
    status = run.status()
    assert status["images_seen"] == 8 and status["epoch"] == pytest.approx(8 / 6, abs=1e-5)
    one.save()
    one.step(), one.roll_back()
    assert run.status()["images_seen"] == 8
    one.step()
    assert run.status()["images_seen"] == 10


def test_memory_in_use_is_told_while_it_trains(tiny, monkeypatch):
    monkeypatch.setattr(sessions, "MEASURED", 0.0)
    run = make(tiny, **PAIRS)
    one = session(run)
    one.step()
    (told,) = events(run, "memory")
    status = run.status()
    assert status["ram_gb"] == told["ram_gb"] > 0 and told["vram_gb"] == 0 and status["waits_for"] == told["waits"]
    one.transition("paused")
    assert run.status()["ram_gb"] is None


def test_going_back_to_a_damaged_save_point_is_refused_and_the_run_has_what_it_goes_on_from(tiny, serve):
    run = make(tiny, **recipe(keep_save_points=3))
    worker, client = serve(run)
    for target in (2, 4):
        client.train(target)
        wait_for_state(client, "finished")
    before = masters(worker._session)
    file = max(run.save_points()[0].path.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-100] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(ValueError, match=file.name) as error:
        client.roll_back(2)
    assert "\n" not in str(error.value) and events(run, "rolled_back") == []
    assert same(masters(worker._session), before) and client.status()["step"] == 4
    client.train(5)
    assert wait_for_state(client, "finished")["step"] == 5


def damage(folder_or_file) -> str:
    """Turn a bit round in a weights file, or in the largest file of a save point; returns its name."""
    some = [folder_or_file] if folder_or_file.is_file() else folder_or_file.glob("*.safetensors")
    file = max(some, key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-100] ^= 0xFF
    file.write_bytes(data)
    return file.name


def test_an_engine_that_has_read_damaged_weights_saves_nothing(tiny, serve):
    run = make(tiny, **PAIRS)
    worker, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    client.train(10_000, pause_at=3)
    wait_for(lambda: client.status()["on_the_way"] == 3)
    name = damage(run.save_points()[0].path)
    with pytest.raises(ValueError, match=f"{name}.*no other save point"):
        client.roll_back()
    wait_for(lambda: not run.locked())
    assert worker._session.trainer.torn and [p.step for p in run.save_points()] == [2]
    assert events(run, "saved")[-1]["step"] == 2 and run.status()["state"] == "stopped"


def test_without_a_save_point_a_damaged_checkpoint_gives_way_to_the_model(tiny):
    run = make(tiny, **recipe(checkpoint_every_steps=1))
    one = session(run)
    before = masters(one)
    one.step(), one.step()
    path = run.checkpoints()[0].path
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 5000)
    assert [c.step for c in run.checkpoints(damaged=True)] == [1, 2]
    one.run.find_source = lambda *_, **__: dataclasses.replace(run.checkpoints(damaged=True)[0])
    with pytest.raises(ValueError, match=path.name):
        one.roll_back(1, fresh=True)
    assert not one.trainer.torn and one.trainer.step == 0 and same(masters(one), before)
    assert run.status()["step"] == 0 and run.losses() == []
    assert one.step() == 1


def test_a_roll_back_that_something_holds_up_leaves_the_engine_where_the_run_is(tiny, monkeypatch):
    run = make(tiny, **recipe(keep_save_points=3))
    one = session(run)
    for _ in range(2):
        one.step(), one.save()
    at_two = masters(one)

    def held(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.saves.savepoints.remove_later", held)
        with pytest.raises(ValueError, match="cannot go back to step 1 yet.*Permission denied"):
            one.roll_back(1)
    assert one.trainer.step == run.status()["step"] == 2 and same(masters(one), at_two)
    assert one.trainer.rollbacks == run.rollbacks == 1
    assert one.roll_back(1) == 1 and [p.step for p in run.save_points()] == [1]


def test_a_signal_while_a_run_goes_back_waits_for_that(tiny, serve, monkeypatch):
    run = make(tiny, **recipe(keep_save_points=2))
    worker, client = serve(run)
    for target in (1, 2):
        client.train(target)
        wait_for_state(client, "finished")
    trainer = worker._session.trainer
    load = trainer.load

    def interrupted(source):
        worker._note_signal("SIGTERM")
        return load(source)

    monkeypatch.setattr(trainer, "load", interrupted)
    assert client.roll_back(1) == 1
    wait_for(lambda: not run.locked())
    assert worker.quitting == "SIGTERM" and run.rollbacks == 1 and [p.step for p in run.save_points()] == [1]


# -- another optimizer on the run's weights


@pytest.mark.parametrize("other", [
    {"kind": "adan", "betas": (0.98, 0.92, 0.99)},
    {"state_format": "f24"},
    {"weight_precision": "stochastic"},
])
def test_another_optimizer_goes_on_from_the_runs_weights_with_moments_of_zero(tiny, serve, other):
    run = make(tiny, optimizer={"weight_precision": "split"}, **PAIRS)
    worker, client = serve(run)
    client.train(3)
    wait_for_state(client, "finished")
    before = masters(worker._session)
    client.stop()
    config = run.config
    new = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **other))
    run.update(new)
    refused = Session(run)
    refused.begin()
    with pytest.raises(ValueError, match="another optimizer"):
        refused.load()
    refused.transition("stopped")

    assert run.renew_moments() == 3 and run.rollbacks == 0
    worker, client = serve(run)
    wait_for_state(client, "paused", "finished")
    one = worker._session
    after = masters(one)
    ties = sum(int((a != b).sum()) for a, b in zip(before.values(), after.values(), strict=True))
    assert ties == 0 or ("weight_precision" in other and ties < 1e-4 * sum(t.numel() for t in after.values()))
    assert (one.trainer.step, one.trainer.since) == (3, 3)
    moments = [t for s in one.trainer.stages for g in s.arena.groups for n, t in g.storage.items() if "exp_avg" in n]
    assert moments and not any(t.any() for t in moments)
    client.train(5)
    assert wait_for_state(client, "finished")["step"] == 5
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4, 5]
    client.stop()
    again = Session(run)
    again.begin()
    again.use(again.load())
    assert (again.trainer.step, again.trainer.since) == (5, 3)


def test_moments_of_a_run_that_was_never_saved_are_zero_as_they_are(tiny):
    run = make(tiny, **PAIRS)
    assert run.renew_moments() == 0
    assert session(run).step() == 1

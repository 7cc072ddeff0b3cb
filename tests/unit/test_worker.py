"""The worker and its clients, on the real engine and the tiny preset: in this process where only messages count, and as
real processes, killed with real signals, where the end of one matters."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from workers import SLOW, make, state_files, wait_for, wait_for_state

from trainer import launch
from trainer.client import RunMovedOn, WorkerDied, open_run
from trainer.config import RunConfig
from trainer.loop import Trainer
from trainer.run import RunDirectory

MAIN = Path(__file__).resolve().parents[2] / "trainer" / "__main__.py"


# -- training, as messages


def test_a_run_trains_to_its_target_and_nothing_happens_the_second_time(tiny, serve):
    run = make(tiny)
    assert run.status()["state"] == "created"
    _, client = serve(run)
    client.train(4)
    status = wait_for_state(client, "finished")
    assert (status["step"], status["target"], status["save_point_step"], status["error"]) == (4, 4, 4, None)
    assert status["loss"] == run.losses()[-1][1] and status["lr"] == 1e-3 and status["seconds_per_step"] > 0
    assert [s for s, _ in run.losses()] == [1, 2, 3, 4]
    assert [s for s, _ in run.evals()] == [0, 4] and run.evals()[1][1] < run.evals()[0][1]
    events = run.events()
    order = [e.get("state") or e["type"] for e in events]
    assert [o for o in order if o != "paused"] == [
        "created", "preparing", "planned", "training", "eval", *["step"] * 4, "saved", "eval", "finished"]
    client.train(4), client.train(2)
    time.sleep(0.3)
    assert run.events() == events
    client.train(6)
    assert wait_for_state(client, "finished")["step"] == 6
    assert [p.step for p in run.save_points()] == [6]


def test_status_waits_for_news_and_hands_over_what_is_new(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    wait_for_state(client, "paused")
    seen = client.status()["last_event"]
    started = time.monotonic()
    assert client.status(since=seen, wait=0.4)["events"] == []
    assert 0.3 < time.monotonic() - started < 2
    client.train(3)
    collected = []
    while not collected or collected[-1].get("state") != "finished":
        news = client.status(since=seen, wait=10)["events"]
        assert news, "the wait ended without news"
        collected += news
        seen = news[-1]["n"]
    assert [e["n"] for e in collected] == list(range(collected[0]["n"], seen + 1))
    assert [e["step"] for e in collected if e["type"] == "step"] == [1, 2, 3]
    other = threading.Timer(0.2, lambda: RunDirectory(run.path).append("sample", file="x.png"))  # as ComfyUI does
    other.start()
    assert [e["type"] for e in client.status(since=seen, wait=10)["events"]] == ["sample"]


def test_pausing_stops_within_a_step_and_writes_nothing(tiny, serve):
    run = make(tiny, **SLOW)
    worker, client = serve(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    call, asked_at = worker._jobs.call, []
    worker._jobs.call = lambda work: asked_at.append(worker._session.trainer.step) or call(work)
    client.pause()
    at = client.status()
    assert at["step"] <= asked_at[0] + 1  # the step that was under way when the request was taken
    assert at["state"] == "paused" and worker._session.parked
    time.sleep(0.3)
    assert client.status()["step"] == at["step"] and run.save_points() == []
    client.train(at["step"] + 2)
    assert wait_for_state(client, "finished")["step"] == at["step"] + 2
    client.pause()
    assert client.status()["state"] == "finished"


def test_pausing_on_the_way_for_a_picture(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(6, pause_at=2)
    assert (wait_for_state(client, "paused")["step"], run.save_points()) == (2, [])
    assert (client.status()["target"], len(run.evals())) == (6, 1)
    client.train(6, pause_at=2)
    assert (client.status()["state"], client.status()["step"]) == ("paused", 2)
    client.train(6, pause_at=4)
    assert wait_for(lambda: client.status()["state"] == "paused" and client.status()["step"]) == 4
    client.train(6)
    assert wait_for_state(client, "finished")["step"] == 6


def test_the_pauses_that_two_clients_ask_for_stand_side_by_side(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    with open_run(run.path, launch=False) as other:
        client.train(8, pause_at=4)
        other.train(8, pause_at=2)
        status = wait_for_state(client, "paused")
        assert (status["step"], status["on_the_way"]) == (2, 2)
        other.train(8, pause_at=6)
        wait_for(lambda: client.status()["on_the_way"] == 4)
        client.train(8)
        wait_for(lambda: client.status()["on_the_way"] == 6)
        client.pause()
        assert client.status()["on_the_way"] is None and client.status()["state"] == "paused"
        other.train(8)
        status = wait_for_state(other, "finished")
        assert status["step"] == 8 and status["on_the_way"] is None


def test_stopping_saves_frees_the_run_and_training_goes_on_later(tiny, serve):
    run = make(tiny, **SLOW)
    _, client = serve(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2)
    client.stop()
    status = run.status()
    assert status["state"] == "stopped" and status["save_point_step"] == status["step"] >= 2
    assert not run.locked() and not run.address_file.exists()
    assert client.status()["state"] == "stopped"  # read from the disk, without a worker
    client.stop(), client.pause()
    at = status["step"]
    _, client = serve(run)
    assert wait_for_state(client, "paused")["step"] == at
    client.train(at + 1)
    wait_for_state(client, "finished")
    assert [s for s, _ in run.losses()] == list(range(1, at + 2)) and len(run.evals()) == 2


def test_stopped_and_resumed_equals_never_stopped(tiny, serve):
    whole = make(tiny, name="whole")
    _, client = serve(whole)
    client.train(6)
    wait_for_state(client, "finished")
    parts = make(tiny, name="parts")
    for target in (2, 5, 6):
        _, client = serve(parts)
        client.train(target)
        wait_for_state(client, "finished")
        client.stop()
    assert parts.status()["state"] == "finished"
    assert parts.losses() == whole.losses()
    a, b = (state_files(r.latest_save_point().path) for r in (whole, parts))
    assert a.keys() == b.keys() and len(a) > 4
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_save_points_by_steps_and_by_minutes(tiny, serve):
    run = make(tiny, name="steps", recipe={"save_every_steps": 3})
    _, client = serve(run)
    client.train(7)
    wait_for_state(client, "finished")
    assert [e["step"] for e in run.events() if e["type"] == "saved"] == [3, 6, 7]
    run = make(tiny, name="minutes", recipe={"save_every_minutes": 1e-6})
    _, client = serve(run)
    client.train(3)
    wait_for_state(client, "finished")
    assert [e["step"] for e in run.events() if e["type"] == "saved"] == [1, 2, 3]
    client.save()
    assert len([e for e in run.events() if e["type"] == "saved"]) == 3  # there is one of this step


def test_predictions_are_those_of_the_weights_at_the_step_asked_for(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    x, t = torch.randn(2, 16, 8, 8), torch.tensor([0.3, 0.8])
    context, pooled, guidance = torch.randn(2, 6, 128), torch.randn(2, 64), torch.tensor([3.5, 1.0])
    inputs = (x, t, context, pooled, guidance)
    before = client.predict(*inputs, step=0)
    trainer = Trainer(run.config, run.path, dataset=run.dataset)
    assert torch.equal(before, trainer.predict(*inputs))
    client.train(2)
    wait_for_state(client, "finished")
    for _ in range(2):
        trainer.train_step()
    after = client.predict(*inputs, step=2)
    assert torch.equal(after, trainer.predict(*inputs)) and not torch.equal(after, before)
    assert torch.equal(client.predict(*inputs), after)
    assert not torch.equal(client.predict(x, t, context, pooled, guidance * 2), after)
    with pytest.raises(RunMovedOn, match="at step 2 and this handle is of step 0.*`after` input"):
        client.predict(*inputs, step=0)
    with pytest.raises((ValueError, RuntimeError)):
        client.predict(x, t, context[:, :, :5], pooled, guidance)
    assert torch.equal(client.predict(*inputs), after)  # and the worker lives on
    assert client.evaluate() == {"step": 2, "loss": trainer.evaluate()}


def test_clients_in_many_threads_get_their_own_answers(tiny, serve):
    run = make(tiny, **SLOW)
    _, client = serve(run)
    wait_for_state(client, "paused")
    client.train(10_000)
    inputs = [(torch.randn(1, 16, 4, 4), torch.rand(1), torch.randn(1, 6, 128), torch.randn(1, 64), torch.ones(1))
              for _ in range(4)]
    failures = []

    def predict(one):
        for _ in range(3):
            shape = client.predict(*one).shape
            if shape != one[0].shape or client.status(wait=0.05)["run"] != run.name:
                failures.append(shape)

    threads = [threading.Thread(target=predict, args=(one,)) for one in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    client.pause()
    assert not failures
    expected = [client.predict(*one) for one in inputs]
    results = [None] * 4
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, client.predict(*inputs[i])))
               for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_export_writes_the_weights_and_the_recipe_but_no_path_and_no_caption(tiny, serve, tmp_path):
    run = make(tiny)
    _, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    out = tmp_path / "out.safetensors"
    done = client.export(out, "f32", {"modelspec.title": "My model"})
    text = f"f32, step 2, {out.stat().st_size / 1e6:.1f} MB"
    assert done == {"path": str(out), "bytes": out.stat().st_size, "step": 2, "dtype": "f32", "text": text}
    trainer = Trainer(run.config, run.path, dataset=run.dataset)
    trainer.load(run.latest_save_point().path)
    exported = load_file(out)
    assert all(torch.equal(exported[n], p) for n, p in trainer.model.named_parameters())
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert about["modelspec.sai_model_spec"] == "1.0.1" and about["modelspec.architecture"] == "flux-1-dev"
    assert (about["modelspec.title"], about["flux_fft.steps"], about["flux_fft.dtype"]) == ("My model", "2", "f32")
    recipe = json.loads(about["flux_fft.recipe"])
    assert recipe["optimizer"]["lr"] == 1e-3 and json.loads(about["flux_fft.dataset"])["pictures"] == 7
    text = json.dumps(about)
    assert str(tmp_path) not in text and "flux.safetensors" not in text and "folder" not in text
    before = out.read_bytes()
    with pytest.raises(ValueError, match="exists: choose another name"):
        client.export(out, "bf16")
    with pytest.raises(ValueError, match="dtype is 'f8'"):
        client.export(tmp_path / "other.safetensors", "f8")
    with pytest.raises(ValueError, match="does not exist"):
        client.export(tmp_path / "nowhere" / "x.safetensors", "bf16")
    assert out.read_bytes() == before and not list(tmp_path.glob("*.part")) and len(list(tmp_path.iterdir())) == 2
    client.export(out, "bf16", overwrite=True)
    assert load_file(out)["img_in.weight"].dtype == torch.bfloat16


def test_new_settings_are_taken_at_the_next_training(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(2)
    wait_for_state(client, "finished")
    old = run.config
    new = RunConfig(**{**vars(old), "optimizer": type(old.optimizer)(**{**vars(old.optimizer), "lr": 1e-5})})
    run.update(new)
    client.train(3)
    assert wait_for_state(client, "finished")["lr"] == 1e-5
    assert [s for s, _ in run.losses()] == [1, 2, 3]


# -- failures


def poison(run: RunDirectory, index: int) -> str:
    """Make a cached latent NaN, as a broken VAE would; returns the picture's name."""
    from trainer.data.cache import Cache

    sample = run.dataset["samples"][index]
    Cache(run.path / "cache").write("latents", sample["latent"], torch.full((16, *sample["shape"]), float("nan")))
    return sample["image"]


def test_a_loss_that_is_no_number_stops_the_run_before_any_weight_changes(tiny, serve):
    run = make(tiny, shapes=[(8, 8)] * 6, recipe={"batch_size": 2})
    _, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    client.stop()
    from trainer.data.batches import batch_indices

    shapes = [(8, 8)] * 6
    third = batch_indices(shapes, 2, 0, 3)[0]
    name = poison(run, third)
    _, client = serve(run)
    inputs = (torch.randn(1, 16, 8, 8), torch.rand(1), torch.randn(1, 6, 128), torch.randn(1, 64), torch.ones(1))
    client.train(10)
    status = wait_for_state(client, "failed")
    assert status["step"] == 2 and "step 3" in status["error"] and name in status["error"]
    good = Trainer(run.config, run.path, dataset=run.dataset)
    good.load(run.latest_save_point().path)
    good.train_step()
    assert torch.equal(client.predict(*inputs), good.predict(*inputs))
    assert client.save() == 2 and run.status()["state"] == "failed"
    client.train(10)
    assert "step 3" in wait_for_state(client, "failed")["error"]
    client.stop()
    assert run.status()["state"] == "failed" and run.status()["save_point_step"] == 2


def test_a_save_that_fails_is_told_and_the_run_waits_for_room(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    # A file where the folder of the new save point is to be made: the system refuses, as it does on a full disk.
    state = run.path / "state"
    state.rename(run.path / "kept")
    state.write_text("")
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    with pytest.raises(ValueError, match="save point of step 2 could not be written"):
        client.stop()
    assert client.status()["state"] == "paused"
    client.train(3)
    assert "could not be written" in wait_for_state(client, "failed")["error"]
    state.unlink()
    (run.path / "kept").rename(state)
    assert [p.step for p in run.save_points()] == [1]
    client.train(3)
    assert wait_for_state(client, "finished")["save_point_step"] == 3


@pytest.mark.parametrize("until", [0, -3, 2.5, "7", None, True])
def test_a_target_that_is_none_is_refused(tiny, serve, until):
    _, client = serve(make(tiny))
    with pytest.raises(ValueError, match="until is .* whole number"):
        client.train(until)


# -- idle manners and owners


def test_an_idle_worker_gives_back_its_vram_then_saves_and_exits(tiny, serve):
    run = make(tiny)
    worker, client = serve(run, idle_park=0.3, idle_exit=2.0)
    client.train(3, pause_at=2)
    wait_for_state(client, "paused")
    assert not worker._session.parked
    wait_for(lambda: worker._session.parked, 5)
    inputs = (torch.randn(1, 16, 8, 8), torch.rand(1), torch.randn(1, 6, 128), torch.randn(1, 64), torch.ones(1))
    client.predict(*inputs)
    assert not worker._session.parked
    wait_for(lambda: not run.locked(), 10)  # asking for its status all the time keeps no worker alive
    status = run.status()
    assert (status["state"], status["save_point_step"]) == ("stopped", 2)


def test_nothing_trained_is_nothing_to_save(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    wait_for_state(client, "paused")
    client.stop()
    assert run.status()["state"] == "stopped" and run.save_points() == []


def test_looking_at_a_finished_run_leaves_it_finished(tiny, serve):
    run = make(tiny)
    _, client = serve(run)
    client.train(1)
    wait_for_state(client, "finished")
    client.stop()
    assert run.status()["state"] == "finished"
    _, client = serve(run)
    wait_for_state(client, "finished")
    client.evaluate()
    client.stop()
    assert run.status()["state"] == "finished"


def test_goodbye_and_other_clients_leaving_do_not_end_it(tiny, serve):
    run = make(tiny)
    worker, _ = serve(run)
    with open_run(run.path, launch=False, owner=True):
        pass
    open_run(run.path, launch=False)._forget()  # gone without a word, but no owner
    time.sleep(0.3)
    assert not worker.quitting
    owner = open_run(run.path, launch=False, owner=True)
    owner._forget()  # the connection drops, as when its process ends
    wait_for(lambda: not run.locked(), 10)


def test_a_worker_at_a_terminal_outlives_comfyui_and_ends_at_its_target(tiny, serve):
    run = make(tiny, **SLOW)
    worker, _ = serve(run, foreground=True, until=10_000)
    owner = open_run(run.path, launch=False, owner=True)
    wait_for(lambda: owner.status()["step"] >= 1)
    owner._forget()
    at = run.status()["step"]
    wait_for(lambda: run.status()["step"] > at + 1)
    other = open_run(run.path, launch=False)
    other.train(run.status()["step"] + 2)
    wait_for(lambda: not run.locked(), 60)
    assert run.status()["state"] == "finished"


# -- real processes


def pid_of(run: RunDirectory) -> int:
    return json.loads(run.address_file.read_text())["pid"]


def test_killed_in_the_middle_it_resumes_from_its_save_point_as_if_nothing_had_happened(tiny, launched):
    settings = {**SLOW, "recipe": {"batch_size": 4, "save_every_steps": 3}}
    run = make(tiny, name="killed", **settings)
    client = launched(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 5, 60)
    threading.Timer(0.5, lambda: os.kill(pid_of(run), signal.SIGKILL)).start()
    killed = time.monotonic() + 0.5
    with pytest.raises(WorkerDied, match=r"likely out of RAM \(killed\).*from its save point at step") as caught:
        while True:
            client.status(since=client.status()["last_event"], wait=30)
    assert time.monotonic() - killed < 2 and "\n" not in str(caught.value)
    status = run.status()
    saved, reached = status["save_point_step"], status["step"]
    assert status["state"] == "interrupted" and saved % 3 == 0 and saved <= reached
    assert client.status()["state"] == "interrupted"
    (run.path / "state" / ".part-step-000999-x").mkdir()

    client.train(reached + 2)  # the same client starts another
    wait_for_state(client, "finished")
    assert os.listdir(run.path / "state") == [f"step-{reached + 2:06d}"]
    assert [e["step"] for e in run.events() if e["type"] == "resumed"] == [saved]
    client.stop()

    whole = make(tiny, name="whole", **settings)
    trainer = Trainer(whole.config, whole.path, dataset=whole.dataset)
    reports = [trainer.train_step() for _ in range(reached + 2)]
    assert run.losses() == [(r.step, r.loss) for r in reports]
    point = whole.write_save_point(trainer.step, trainer.save)
    a, b = state_files(point.path), state_files(run.latest_save_point().path)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(tiny, launched, number):
    run = make(tiny, **SLOW)
    client = launched(run)
    client.train(10_000)
    wait_for(lambda: client.status()["step"] >= 2, 60)
    os.kill(pid_of(run), number)
    wait_for(lambda: not run.locked(), 10)
    status = run.status()
    assert status["state"] == "stopped" and status["save_point_step"] == status["step"] >= 2
    assert client._child.wait(5) == 0 and launch.ended_in_order(run.log_file)
    assert client.status()["state"] == "stopped"


def test_when_its_owner_is_killed_the_worker_saves_and_exits(tiny):
    run = make(tiny, **SLOW)
    code = ("import sys, time; from trainer.client import open_run\n"
            "client = open_run(sys.argv[1], owner=True); client.train(10_000)\n"
            "while client.status()['step'] < 2: time.sleep(0.05)\n"
            "print('training', flush=True); time.sleep(60)")
    parent = subprocess.Popen([sys.executable, "-c", code, run.path], cwd=MAIN.parents[1], stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"training\n"
    worker = pid_of(run)
    if hasattr(os, "getsid"):
        assert os.getsid(worker) == worker != os.getsid(parent.pid)  # Ctrl-C in the parent's terminal does not reach it
    parent.kill()
    parent.wait()
    wait_for(lambda: not run.locked(), 15)
    status = run.status()
    assert status["state"] == "stopped" and status["save_point_step"] == status["step"] >= 2
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.kill(worker, 0)
            time.sleep(0.05)


def test_two_who_open_a_run_at_once_meet_one_worker_and_a_second_worker_is_refused(tiny, launched):
    run = make(tiny)
    clients = []
    threads = [threading.Thread(target=lambda: clients.append(launched(run))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(clients) == 3 and len({c._address for c in clients}) == 1
    second = subprocess.run([sys.executable, MAIN, "worker", run.path], capture_output=True, text=True)
    assert second.returncode == launch.EXIT_LOCKED and "open in another process" in second.stderr
    clients[0].train(1)
    wait_for_state(clients[1], "finished")
    clients[2].stop()
    assert clients[0].status()["state"] == "finished"


def test_the_last_words_of_a_worker_are_in_the_error(tiny, launched):
    run = make(tiny)
    client = launched(run)
    wait_for_state(client, "paused")
    os.kill(pid_of(run), signal.SIGSEGV)
    with pytest.raises(WorkerDied, match="Fatal Python error: Segmentation fault"):
        client.evaluate()
    run.address_file.unlink()
    run.address_file.mkdir()  # where the next worker cannot say that it is there
    words = r"could not begin: .*worker\.json: (Is a directory|Permission denied|Access is denied)"
    with pytest.raises(WorkerDied, match=words):
        launched(run)


def test_a_worker_starts_clean_wherever_it_is_started_from(tiny, launched, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.chdir(tmp_path)
    run = make(tiny)
    client = launched(RunDirectory("run"), idle_exit=1.0)
    environment = Path(f"/proc/{pid_of(run)}/environ")
    if environment.exists():
        assert b"ALLOC_CONF" not in environment.read_bytes() and b"PYTHONUTF8=1" in environment.read_bytes()
        assert os.readlink(f"/proc/{pid_of(run)}/cwd") != str(run.path)
    wait_for_state(client, "paused")
    wait_for(lambda: not run.locked(), 20, "the idle worker's end")
    assert client.evaluate()["step"] == 0  # and it is started again where it is needed
    with pytest.raises(ValueError, match="no run directory"):
        open_run(tmp_path)


def test_a_run_whose_model_is_gone_says_so_and_lets_go(tiny, launched):
    run = make(tiny)
    flux = Path(run.config.model.flux)
    flux.rename(flux.with_suffix(".away"))
    client = launched(run)
    with pytest.raises(ValueError, match="flux.safetensors does not exist"):
        client.evaluate()
    assert "flux.safetensors" in wait_for_state(client, "failed")["error"]
    flux.with_suffix(".away").rename(flux)
    launched(run).train(1)  # whoever comes anew waits for it to end, and gets another
    status = wait_for_state(client, "finished")
    assert (status["step"], status["error"]) == (1, None)


def test_why_a_worker_could_not_begin_is_in_the_error(tiny, launched, monkeypatch):
    run = make(tiny)
    monkeypatch.setenv(launch.IDLE_MINUTES, "never")
    with pytest.raises(WorkerDied, match=r"could not begin: FLUX_FFT_IDLE_MINUTES is 'never': give a number") as caught:
        launched(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
@pytest.mark.parametrize("flags", [[], ["-s"]])
def test_the_environment_of_a_worker(tiny, tmp_path, given, policy, flags):
    run = make(tiny)
    code = ("import subprocess, sys\nfrom trainer import launch\nfrom trainer.run import RunDirectory\n"
            "real, seen = subprocess.Popen, {}\n"
            "idle = [sys.executable, '-c', '']\n"
            "subprocess.Popen = lambda command, **options: seen.update(options['env']) or real(idle)\n"
            "launch.start(RunDirectory(sys.argv[1])).wait(10)\n"
            "print(seen['OMP_WAIT_POLICY'], seen.get('PYTHONNOUSERSITE'))")
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "PYTHONNOUSERSITE")}
    if given:
        environment["OMP_WAIT_POLICY"] = given
    done = subprocess.run([sys.executable, *flags, "-c", code, run.path], cwd=MAIN.parents[1], env=environment,
                          capture_output=True, text=True)
    assert done.stdout == f"{policy} {'1' if flags else None}\n", done.stderr


@pytest.mark.parametrize(("lines", "words"), [
    ("", ""),
    ("2026-01-01 00:00:00,000 INFO x: {start}\nTraceback (most recent call last):\n  File\nfoo.Bar: no\nmore\n",
     "foo.Bar: no"),
    ("Traceback (most recent call last):\n  File\nOld: no\n2026-01-01 00:00:00,000 INFO x: {start}\n", ""),
    ("2026-01-01 00:00:00,000 INFO x: {start}\n2026-01-01 00:00:00,000 ERROR x: a request failed\n"
     "Traceback (most recent call last):\n  File\nKeyError: 'x'\n2026-01-01 00:00:00,000 INFO x: on\n", ""),
    ("2026-01-01 00:00:00,000 INFO x: {start}\nFatal Python error: Aborted\n\nThread 0x1:\n  File\n",
     "Fatal Python error: Aborted"),
])
def test_last_words_are_those_of_the_newest_worker_at_its_end(tmp_path, lines, words):
    log = tmp_path / "worker.log"
    log.write_text(lines.format(start=launch.STARTED))
    assert launch.last_words(log) == words
    assert launch.last_words(tmp_path / "none") == ""

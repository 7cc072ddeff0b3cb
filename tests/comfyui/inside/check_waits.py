"""Waiting for a worker, and for the room that others give back."""

from __future__ import annotations

from given import refused


def check_a_wait_ends_on_cancel() -> None:
    import threading
    import time

    import comfy.model_management
    from pack.nodes import registry

    threading.Timer(0.3, comfy.model_management.interrupt_current_processing).start()
    began = time.monotonic()
    try:
        registry.cancellable(time.sleep, 30)
    except comfy.model_management.InterruptProcessingException:
        assert time.monotonic() - began < 20
    else:
        raise AssertionError("the wait went on")
    assert registry.cancellable(lambda: 7) == 7
    assert "three" in refused(lambda: registry.cancellable(_raise))


def _raise() -> None:
    raise ValueError("three")


def check_a_cancel_is_heard_by_a_prompt_that_has_only_just_begun() -> None:
    """ComfyUI forgets what came between its taking a prompt out of the queue and that prompt's first node."""
    import types

    import comfy.model_management
    import execution
    from pack.nodes import bridge
    from server import PromptServer

    import nodes

    before = getattr(PromptServer, "instance", None)
    server = PromptServer.instance = types.SimpleNamespace(queue_updated=lambda: None, last_prompt_id=None)
    server.prompt_queue = queue = execution.PromptQueue(server)
    try:
        queue.put((0, "first", {}, {}, []))
        queue.put((1, "second", {}, {}, []))
        assert not bridge.cancel("first"), "it only waits"
        (_, server.last_prompt_id, *_), key = queue.get()
        assert bridge.cancel("first") and not bridge.cancel("second")
        nodes.interrupt_processing(False)  # as its execution begins
        try:
            bridge.throw_if_cancelled()
            raise AssertionError("it went on")
        except comfy.model_management.InterruptProcessingException:
            pass
        bridge.throw_if_cancelled()  # once
        assert bridge.cancel("first")
        nodes.interrupt_processing(False)
        queue.task_done(key, {}, status=None)
        (_, server.last_prompt_id, *_), key = queue.get()
        bridge.throw_if_cancelled()  # not the next one
        bridge.take_cancel()  # this one parks: it waits for its step's end, however often it is told to end
        assert bridge.cancel("second") and bridge.ending() == "second"
        bridge.throw_if_cancelled()
    finally:
        PromptServer.instance = before
        bridge.take_cancel()


def check_what_a_wait_ended_by_is_not_asked_while_the_run_parks() -> None:
    """Pause presses ask twice: the prompt's end, and the worker. The second must not cut short the wait for VRAM."""
    from pack.nodes import registry

    def off() -> None:
        raise ValueError("called off")

    with registry.ended_by(off):
        assert "called off" in refused(lambda: registry.cancellable(lambda: 7))
        with registry.ended_by_cancel_alone():
            assert registry.cancellable(lambda: 7) == 7
        assert "called off" in refused(lambda: registry.cancellable(lambda: 7))


def check_a_wait_that_was_cancelled_starts_nothing() -> None:
    import threading
    import time

    import comfy.model_management
    from pack.nodes import registry

    started = []

    def work() -> None:
        time.sleep(0.6)
        registry.check_wanted()
        started.append(1)

    threading.Timer(0.2, comfy.model_management.interrupt_current_processing).start()
    try:
        registry.cancellable(work)
        raise AssertionError("the wait went on")
    except comfy.model_management.InterruptProcessingException:
        pass
    try:
        registry.cancellable(work, seconds=0.1)
        raise AssertionError("the wait went on")
    except TimeoutError:
        pass
    time.sleep(1.0)
    assert not started
    registry.cancellable(work)
    assert started


def check_a_second_cancel_keeps_no_run_from_being_paused() -> None:
    import threading
    from types import SimpleNamespace

    import comfy.model_management
    from pack.nodes import bridge, training

    for at_once in (True, False):
        paused, release = threading.Event(), threading.Event()

        def pause(paused: threading.Event = paused, release: threading.Event = release) -> None:
            paused.set()
            release.wait(30)

        client = SimpleNamespace(pause=pause, run=SimpleNamespace(status=lambda: {"saving": None, "state": "paused"}))
        again = comfy.model_management.interrupt_current_processing
        threading.Timer(0.5, again).start() if not at_once else None
        try:
            with training._parked_on_error(client, bridge.Progress(1, None)):
                if at_once:  # it is there before anything looks for it
                    again()
                raise bridge.end_prompt()
        except BaseException as error:
            assert bridge.ends_prompt(error)
        assert paused.wait(10), "the run trains on, and nobody waits for it"
        release.set()


def check_room_is_made_by_whoever_rests_and_nobody_else() -> None:
    """Workers that this process has not started: of a run that is paused, and of one that trains."""
    import os
    import tempfile
    import time
    from pathlib import Path
    from types import SimpleNamespace

    import torch
    from pack.nodes import registry
    from pack.trainer.client import open_run
    from pack.trainer.config import DatasetConfig, MemoryConfig, ModelConfig, RecipeConfig, RunConfig
    from pack.trainer.data.cache import Cache
    from pack.trainer.demo_data import write_demo
    from pack.trainer.flux.variants import require_flux
    from pack.trainer.run import RunDirectory

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False):
        flux = str(write_demo(f"{folder}/files")["flux"])
        sizes = require_flux(flux).flux
        runs = {}
        for name in ("resting", "training", "wanted"):
            root = Path(folder, "home", name)
            cache = Cache(root / "cache")
            cache.write("latents", "one", torch.zeros(16, 8, 8))
            cache.write("captions", "text", torch.zeros(4, sizes["context_in_dim"]), torch.zeros(sizes["vec_in_dim"]))
            sample = {"image": "1.png", "latent": "one", "shape": [8, 8], "caption": "text"}
            manifest = {"format": 1, "cache": "cache", "samples": [sample], "empty_caption": "text",
                        "fingerprint": "f" * 64}
            config = RunConfig(name=name, model=ModelConfig(flux=flux), dataset=DatasetConfig(folder=folder),
                               memory=MemoryConfig(device="cpu"), recipe=RecipeConfig(batch_size=1))
            runs[name] = RunDirectory.create(root, config, manifest)
        os.environ["FLUX_FFT_HOME"] = str(Path(folder, "home"))
        memory, registry.machine = registry.machine, SimpleNamespace(free_ram=lambda: 0)
        try:
            with open_run(runs["resting"].path) as resting, open_run(runs["training"].path) as training:
                resting.train(1)
                training.train(1_000_000)
                while resting.status()["state"] != "finished" or training.status()["step"] < 1:
                    time.sleep(0.1)
                registry._make_room(runs["wanted"])
                assert not runs["resting"].locked() and runs["resting"].status()["state"] == "finished"
                assert runs["resting"].status()["save_point_step"] == 1
                assert training.status()["state"] == "training"
                training.stop()
        finally:
            registry.machine = memory
            del os.environ["FLUX_FFT_HOME"]

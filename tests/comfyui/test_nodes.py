"""The nodes as ComfyUI describes them, what they cost at its start, and the smaller ones at work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.comfyui.graphs import Demo, demo, sample, start, train, with_previews
from tests.comfyui.server import PACK, Graph, Install, Server

NODES = [
    "FluxFFTModel", "FluxFFTMergeLoRA", "FluxFFTDataset", "FluxFFTPictureSettings", "FluxFFTCaptionSettings",
    "FluxFFTOptimizerNAdam", "FluxFFTOptimizerAdan", "FluxFFTMemory", "FluxFFTRecipe", "FluxFFTStart", "FluxFFTOpenRun",
    "FluxFFTTrainSteps", "FluxFFTPreviewSettings", "FluxFFTPreview", "FluxFFTCompare", "FluxFFTRunModel",
    "FluxFFTLossPlot", "FluxFFTExport", "FluxFFTDemo", "FluxFFTDoctor",
]  # fmt: skip

LOAD = """
import builtins, importlib.util, json, sys, time
name, where = "pack_under_test", sys.argv[1]
sys.path.insert(0, ".")
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
began = time.process_time()
import utils.extra_config, comfy_api.latest, server, nodes  # by the time it loads packs, ComfyUI has these
comfyui, there = time.process_time() - began, set(sys.modules)
culprits, original = [], builtins.__import__

def watched(module, globals=None, *args, **kwargs):
    heavy = module.split(".")[0] in ("torch", "matplotlib", "safetensors")
    if heavy and (globals or {}).get("__name__", "").startswith(name):
        culprits.append(f"{globals['__name__']} imports {module}")
    return original(module, globals, *args, **kwargs)

builtins.__import__ = watched
spec = importlib.util.spec_from_file_location(name, where + "/__init__.py", submodule_search_locations=[where])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
began = time.process_time()
spec.loader.exec_module(module)
share = (time.process_time() - began) / comfyui
others = [m for m in sys.modules.keys() - there if not m.startswith(name)]
print(json.dumps({"share": share, "culprits": culprits, "others": others, "web": module.WEB_DIRECTORY}))
"""


def test_loading_costs_little_and_imports_no_torch(install: Install) -> None:
    done = subprocess.run([install.python, "-c", LOAD, str(PACK)], cwd=install.path, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["culprits"] == [] and not {m.split(".")[0] for m in found["others"]} - sys.stdlib_module_names
    assert found["share"] < 0.1, "of the time that ComfyUI's own modules take"


def test_every_node_is_there_and_explains_itself(server: Server) -> None:
    info = server.get("/object_info")
    assert sorted(n for n in info if n.startswith("FluxFFT")) == sorted(NODES)
    for name in NODES:
        node = info[name]
        assert node["category"] == "Flux Full Fine-Tune"
        assert node["description"] and node["display_name"]
        for inputs in node["input"].values():
            for key, spec in inputs.items():
                if key in ("unique_id", "prompt", "extra_pnginfo"):
                    continue
                assert len(spec[1]["tooltip"]) > 20, (name, key)
                assert key not in ("seed", "noise_seed", "status"), (name, key)
    rate = info["FluxFFTOptimizerNAdam"]["input"]["required"]["learning_rate"]
    assert (rate[0], rate[1]["default"]) == ("STRING", "3.5e-6")
    assert info["FluxFFTOptimizerAdan"]["input"]["required"]["learning_rate"][1]["default"] == "3.3e-5"
    assert info["FluxFFTRecipe"]["input"]["required"]["batch_size"][1]["default"] == 5
    assert info["FluxFFTTrainSteps"]["input"]["required"]["steps"][1]["default"] == 500
    outputs = {n for n in NODES if info[n]["output_node"]}
    assert outputs == {"FluxFFTTrainSteps", "FluxFFTPreview", "FluxFFTCompare", "FluxFFTLossPlot", "FluxFFTExport",
                       "FluxFFTDoctor"}  # fmt: skip


def test_the_log_says_what_loading_took(server: Server) -> None:
    took = re.search(r"([\d.]+) seconds: .*flux-full-fine-tune", server.log.read_text(encoding="utf-8"))
    assert took, server.tail()
    assert "IMPORT FAILED" not in server.log.read_text(encoding="utf-8")


def test_defaults_are_the_defaults_of_the_config(server: Server) -> None:
    """A graph whose optional nodes are connected, untouched, is the graph without them."""
    info = server.get("/object_info")

    def untouched(g: Graph, name: str) -> list:
        inputs = {key: spec[1]["default"] for key, spec in info[name]["input"]["required"].items()}
        return g.add(name, **inputs).out(0)

    plain, full = Graph(), Graph()
    parts = demo(plain)
    train(plain, parts._replace(recipe=None, optimizer=None), "plain", 1)
    parts = demo(full)
    parts = parts._replace(recipe=untouched(full, "FluxFFTRecipe"), optimizer=untouched(full, "FluxFFTOptimizerNAdam"))
    run = start(full, parts, "full")
    full[run]["inputs"]["memory"] = untouched(full, "FluxFFTMemory")
    full.add("FluxFFTTrainSteps", run=run, steps=1)
    for g in (plain, full):
        for node in g.values():
            node["inputs"] = {k: v for k, v in node["inputs"].items() if v is not None}
        assert not server.run(g).error
    configs = [json.loads((server.home / n / "config.json").read_text()) for n in ("plain", "full")]
    assert {**configs[0], "name": ""} == {**configs[1], "name": ""}
    assert configs[0]["optimizer"]["lr"] == 3.5e-6


def test_the_doctor_examines_the_machine_and_leaves_its_speeds_to_the_plan(server: Server) -> None:
    g = Graph()
    doctor = g.add("FluxFFTDoctor", device="cpu", examination=1)
    done = server.run(g)
    assert not done.error
    text = done.text(doctor)
    assert "streamed equals resident: yes" in text and text.endswith("```")
    assert json.loads((server.home / "machine.json").read_text())["speeds"]["tflops"] > 0


def test_a_loss_plot(server: Server) -> None:
    g = Graph()
    plot = g.add("FluxFFTLossPlot", run=train(g, demo(g), "plot", 4), smoothing=0.5)
    shown = g.add("PreviewImage", images=plot.out(1))
    result = server.run(g)
    assert not result.error
    assert "at step 4" in result.text(plot)
    file = result.outputs[plot]["images"][0]
    with Image.open(server.base / file["type"] / file["subfolder"] / file["filename"]) as picture:
        assert picture.width > 400 and len(np.unique(np.asarray(picture))) > 10
    assert result.outputs[shown]["images"]


def test_an_opened_run_is_as_it_is(server: Server) -> None:
    g = Graph()
    parts = demo(g)
    train(g, parts, "opened", 2)
    server.run(g)

    opened = Graph()
    run = opened.add("FluxFFTOpenRun", run_name="opened")
    preview = opened.add("FluxFFTPreview", run=run, previews=with_previews(opened))
    result = server.run(opened)
    assert not result.error
    assert "at step 2, sampled" in result.text(preview)
    assert server.run(opened).executed == []
    shown = server.get("/object_info/FluxFFTOpenRun")["FluxFFTOpenRun"]["input"]["required"]["run_name"]
    assert "opened" in shown[1]["options"]

    g["3"]["inputs"]["steps"] = 3
    server.run(g)
    later = server.run(opened)
    assert "at step 3, sampled" in later.text(preview), "a run that was trained further is not the one in the cache"

    opened[run]["inputs"]["run_name"] = "no_such_run"
    with pytest.raises(Exception, match="no_such_run"):
        server.run(opened)


def test_linked_encoders_stand_in_for_files(server: Server) -> None:
    from trainer.demo_data import write_demo

    files = write_demo(server.base / "linked")
    os.link(files["flux"], server.base / "models/diffusion_models/linked.safetensors")
    g = Graph()
    source = demo(g)
    model = g.add("FluxFFTModel", flux="linked.safetensors", clip_l="from the link", t5="from the link",
                  vae="from the link", clip_override=source.clip, vae_override=source.vae)
    parts = Demo(model.out(0), *source[1:])
    trained = train(g, parts, "linked", 2, previews=with_previews(g, every=2))
    result = server.run(g)
    assert not result.error
    assert len(result.outputs[trained]["images"]) == 1

    del g[model]["inputs"]["clip_override"]
    assert "clip_l" in server.run(g).error


def test_previews_outside_of_the_output_folder(install: Install, tmp_path: Path) -> None:
    """With FLUX_FFT_HOME elsewhere the canvas still gets its pictures; and the worker goes when ComfyUI goes."""
    home = tmp_path / "elsewhere"
    server = Server(install, tmp_path / "base", env={"FLUX_FFT_HOME": str(home)})
    try:
        g = Graph()
        trained = train(g, demo(g), "far", 2, previews=with_previews(g, every=2))
        result = server.run(g)
        assert not result.error
        file = result.outputs[trained]["images"][0]
        assert file["type"] == "temp"
        assert (server.base / "temp" / file["subfolder"] / file["filename"]).is_file()
        assert (home / "far/config.json").is_file()
        assert not (server.base / "output/flux_fft").exists()

        g[trained]["inputs"]["steps"] = 1_000_000
        del g[trained]["inputs"]["previews"]
        server.post("/prompt", {"prompt": g, "client_id": server.client_id})
        from trainer.run import RunDirectory

        run = RunDirectory(home / "far")
        wait_for(lambda: run.status()["step"] >= 5)
    finally:
        server.process.kill()
        server.process.wait()
    wait_for(lambda: not run.worker_alive())
    status = run.status()
    assert status["state"] == "stopped"
    assert status["save_point_step"] == status["step"] >= 5, "no step is lost"


def wait_for(what, seconds: float = 60.0) -> None:
    import time

    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def test_sampling_settings_of_the_model_may_be_changed(server: Server) -> None:
    """What concerns sampling only works on the proxy: the shift, and a different sampler."""
    g = Graph()
    parts = demo(g)
    model = g.add("FluxFFTRunModel", run=train(g, parts, "shift", 1))
    shifted = g.add("ModelSamplingFlux", model=model, max_shift=2.0, base_shift=0.5, width=64, height=64)
    sampler, _ = sample(g, shifted, parts.clip, "shift")
    g[sampler]["inputs"]["sampler_name"] = "dpmpp_2m"
    assert not server.run(g).error

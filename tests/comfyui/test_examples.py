"""The example workflows: the same graphs as the prompts beside this file, accepted and run by the server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.comfyui.server import PACK, Graph, Server
from tests.comfyui.workflows import to_prompt
from trainer.demo_data import write_demo
from trainer.run import RunDirectory

TWINS = {
    "demo on any machine - Flux full fine-tune": "demo",
    "FLUX.1 dev in four nodes - Flux full fine-tune": "flux_dev_minimal",
    "FLUX.1 dev with previews - Flux full fine-tune": "flux_dev",
    "24 GB card, 64 GB RAM - Flux full fine-tune": "flux_dev_24gb",
    "32 GB card, 128 GB RAM, Adan - Flux full fine-tune": "flux_dev_adan",
    "as in the prototype - Flux full fine-tune": "flux_dev_prototype",
    "continue a run - Flux full fine-tune": "continue",
    "compare two runs - Flux full fine-tune": "compare",
}
SMALL = {
    "FluxFFTTrainSteps": {"steps": 2},
    "FluxFFTPreviewSettings": {"width": 64, "height": 64, "sampling_steps": 4, "every_n_steps": 2},
    "FluxFFTDataset": {"resolution": 64},
}
"""What is changed in a twin so that it runs on the demo's files in seconds."""


def twin(name: str) -> Graph:
    return Graph(json.loads((PACK / f"tests/comfyui/prompts/{name}.json").read_text(encoding="utf-8")))


def node(g: Graph, kind: str) -> str:
    """The id of the only node of a kind."""
    (found,) = [key for key, value in g.items() if value["class_type"] == kind]
    return found


def small(name: str, **train: int) -> Graph:
    """A twin, with little to do."""
    g = twin(name)
    for value in g.values():
        value["inputs"] |= SMALL.get(value["class_type"], {})
        if value["class_type"] == "FluxFFTTrainSteps":
            value["inputs"] |= train
    return g


@pytest.fixture(scope="module")
def files(server: Server) -> None:
    """The demo's files under the names of FLUX.1 dev's."""
    made = write_demo(server.base / "demo_files")
    for kind, name, source in (("diffusion_models", "flux1-dev", "flux"), ("text_encoders", "clip_l", "captions"),
                               ("text_encoders", "t5xxl_fp16", "captions"), ("vae", "ae", "vae")):
        shutil.copy(made[source], server.base / "models" / kind / f"{name}.safetensors")
    shutil.copytree(made["drawings"], server.base / "input/my_pictures")


def trained(server: Server, name: str) -> None:
    """Train a twin's run unless it is there."""
    g = small(name)
    if not (server.home / g[node(g, "FluxFFTStart")]["inputs"]["run_name"]).is_dir():
        assert not server.run(g, seconds=300).error


def test_every_example_has_a_twin() -> None:
    assert {p.stem for p in (PACK / "example_workflows").glob("*.json")} == set(TWINS)


@pytest.mark.parametrize("name", TWINS)
def test_a_workflow_is_its_prompt(server: Server, name: str) -> None:
    workflow = json.loads((PACK / f"example_workflows/{name}.json").read_text(encoding="utf-8"))
    assert to_prompt(workflow, server.get("/object_info")) == twin(TWINS[name])


@pytest.mark.parametrize("name", TWINS)
def test_a_workflow_says_where_its_files_come_from(server: Server, name: str) -> None:
    workflow = json.loads((PACK / f"example_workflows/{name}.json").read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        files = [value for value in node.get("widgets_values", []) if str(value).endswith(".safetensors")]
        told = node["properties"].get("models", [])
        assert [model["name"] for model in told] == files
        for model in told:
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{model['name']}")
            assert (server.base / "models" / model["directory"]).is_dir()


def test_the_demo_runs(server: Server) -> None:
    g = twin("demo")
    trained = node(g, "FluxFFTTrainSteps")
    g[trained]["inputs"]["steps"] = 6
    g[node(g, "FluxFFTPreviewSettings")]["inputs"]["every_n_steps"] = 3

    result = server.run(g)

    assert not result.error
    assert server.steps("my_demo") == [1, 2, 3, 4, 5, 6]
    assert len(result.outputs[trained]["images"]) == 4, "the newest pictures, one for each prompt"
    assert result.outputs[node(g, "PreviewImage")]["images"]
    assert result.outputs[node(g, "FluxFFTLossPlot")]["images"]


@pytest.mark.usefixtures("files")
def test_four_nodes_are_the_same_run_as_all_of_them_and_it_can_be_continued(server: Server) -> None:
    assert not server.run(small("flux_dev_minimal"), seconds=300).error
    assert server.steps("my_flux") == [1, 2]

    g = small("flux_dev", steps=4)  # every default, spelled out
    result = server.run(g, seconds=300)

    assert not result.error
    assert server.steps("my_flux") == [1, 2, 3, 4]
    assert len(result.outputs[node(g, "FluxFFTTrainSteps")]["images"]) == 2
    assert (server.base / "models/diffusion_models/my_flux_000004.safetensors").is_file()

    for until in (6, 8):
        assert not server.run(small("continue"), seconds=300).error
        assert server.steps("my_flux") == list(range(1, until + 1))
        assert (server.base / f"models/diffusion_models/my_flux_{until:06d}.safetensors").is_file()


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name, run, vram, ram", [
    ("flux_dev_24gb", "my_flux_24gb", 24, 64), ("flux_dev_adan", "my_flux_adan", 32, 128),
    ("flux_dev_prototype", "my_flux_prototype", 32, 128), ("flux_dev_minimal", "my_flux", 24, 128)])
def test_a_run_fits_the_machine_that_its_example_is_for(
        server: Server, name: str, run: str, vram: int, ram: int) -> None:
    trained(server, name)
    assert server.steps(run)[:2] == [1, 2]
    config = RunDirectory(server.home / run).config
    command = [sys.executable, str(PACK / "trainer/__main__.py"), "plan", "--json", "--preset", "flux-dev",
               "--vram", str(vram), "--ram", str(ram), "--batch", str(config.recipe.batch_size),
               "--optimizer", config.optimizer.kind, "--state-format", config.optimizer.state_format,
               "--weight-precision", config.optimizer.weight_precision]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["fits"], done.stdout
    if name != "flux_dev_minimal":
        assert (server.base / f"models/diffusion_models/{run}_000002.safetensors").is_file()


@pytest.mark.usefixtures("files")
def test_two_runs_are_compared(server: Server) -> None:
    trained(server, "flux_dev_minimal")
    trained(server, "flux_dev_adan")
    g = small("compare")
    parent = server.install.at_least(0, 9)  # older ones load no Flux of the demo's width by themselves
    for value in g.values():
        if value["class_type"] == "FluxFFTCompare":
            value["inputs"]["parent"] = parent
    result = server.run(g, seconds=300)
    assert not result.error
    shown = [key for key, value in g.items() if value["class_type"] in ("FluxFFTCompare", "FluxFFTLossPlot")]
    assert len(shown) == 4 and all(result.outputs[key]["images"] for key in shown)
    said = [result.text(key) for key in shown if g[key]["class_type"] == "FluxFFTCompare"]
    assert all("step 2" in text and ("parent, " in text) == parent for text in said)

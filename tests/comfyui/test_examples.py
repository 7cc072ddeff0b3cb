"""The example workflows: the same graphs as the prompts beside this file, accepted and run by the server."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.comfyui.server import PACK, Graph, Server
from tests.comfyui.workflows import to_prompt
from trainer.demo_data import write_demo

TWINS = {"Flux full fine-tune - demo on any machine": "demo",
         "Flux full fine-tune - FLUX.1 dev with previews": "flux_dev"}


def twin(name: str) -> Graph:
    return Graph(json.loads((PACK / f"tests/comfyui/prompts/{name}.json").read_text(encoding="utf-8")))


def node(g: Graph, kind: str) -> str:
    """The id of the only node of a kind."""
    (found,) = [key for key, value in g.items() if value["class_type"] == kind]
    return found


def test_every_example_has_a_twin() -> None:
    assert {p.stem for p in (PACK / "example_workflows").glob("*.json")} == set(TWINS)


@pytest.mark.parametrize("name", TWINS)
def test_a_workflow_is_its_prompt(server: Server, name: str) -> None:
    workflow = json.loads((PACK / f"example_workflows/{name}.json").read_text(encoding="utf-8"))
    assert to_prompt(workflow, server.get("/object_info")) == twin(TWINS[name])


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


def test_the_dev_graph_runs_on_small_files_of_the_same_names(server: Server) -> None:
    files = write_demo(server.base / "demo_files")
    for kind, name, source in (("diffusion_models", "flux1-dev", "flux"), ("text_encoders", "clip_l", "captions"),
                               ("text_encoders", "t5xxl_fp16", "captions"), ("vae", "ae", "vae")):
        shutil.copy(files[source], server.base / "models" / kind / f"{name}.safetensors")
    shutil.copytree(files["drawings"], server.base / "input/my_pictures")
    g = twin("flux_dev")
    trained = node(g, "FluxFFTTrainSteps")
    g[trained]["inputs"]["steps"] = 4
    g[node(g, "FluxFFTPreviewSettings")]["inputs"] |= {"every_n_steps": 2, "width": 64, "height": 64}
    g[node(g, "FluxFFTDataset")]["inputs"]["resolution"] = 64

    result = server.run(g, seconds=300)

    assert not result.error
    assert server.steps("my_flux") == [1, 2, 3, 4]
    assert len(result.outputs[trained]["images"]) == 2
    assert (server.base / "models/diffusion_models/my_flux_000004.safetensors").is_file()

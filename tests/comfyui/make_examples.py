"""Writes the example workflows again from their prompts: ``python -m tests.comfyui.make_examples URL``.

For when a node has got inputs, or a prompt is changed by hand: values, sockets and links are those of the prompt and of
the server's nodes, places, notes and bends of links those of the file that is there. For a new one, draw it in ComfyUI,
save it there, and its API format among the prompts.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

from tests.comfyui.server import PACK
from tests.comfyui.workflows import inputs_of, is_widget, to_workflow

_HUB = "https://huggingface.co"
MODELS = {name: {"name": name, "url": f"{_HUB}/{place}/{name}", "directory": directory} for name, directory, place in (
    ("flux1-dev.safetensors", "diffusion_models", "Comfy-Org/flux1-dev/resolve/main"),
    ("clip_l.safetensors", "text_encoders", "comfyanonymous/flux_text_encoders/resolve/main"),
    ("t5xxl_fp16.safetensors", "text_encoders", "comfyanonymous/flux_text_encoders/resolve/main"),
    ("ae.safetensors", "vae", "Comfy-Org/Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae"),
)}
"""Where ComfyUI's own templates have the files from: for who lacks them, it names folder and download."""


def with_defaults(prompt: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """A prompt with every widget that its nodes have now, in their order."""
    for node in prompt.values():
        specs = inputs_of(info[node["class_type"]])
        given = {n: s[1].get("default") for n, s in specs.items() if is_widget(s) and len(s) > 1} | node["inputs"]
        node["inputs"] = {name: given[name] for name in specs if name in given}
    return prompt


def again(workflow: dict[str, Any], prompt: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """The workflow of a prompt, drawn as the one that is there."""
    notes = [n for n in workflow["nodes"] if n["type"] not in info]
    places = {str(n["id"]): (*n["pos"], *n["size"]) for n in workflow["nodes"]}
    drawn = to_workflow(prompt, places, info, notes)
    for node in drawn["nodes"]:
        models = [MODELS[value] for value in node.get("widgets_values", []) if value in MODELS]
        if models:
            node["properties"]["models"] = models
    return {**drawn, "id": workflow["id"], "extra": workflow["extra"]}


def main(url: str) -> None:
    from tests.comfyui.test_examples import TWINS

    with urllib.request.urlopen(f"{url.rstrip('/')}/object_info") as answer:
        info = json.load(answer)
    for name, twin in TWINS.items():
        path, source = PACK / f"example_workflows/{name}.json", PACK / f"tests/comfyui/prompts/{twin}.json"
        prompt = with_defaults(json.loads(source.read_text(encoding="utf-8")), info)
        workflow = again(json.loads(path.read_text(encoding="utf-8")), prompt, info)
        for target, data in ((source, prompt), (path, workflow)):
            target.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1])

"""Pieces of graphs that several tests use."""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

from tests.comfyui.server import Graph, Node, Server
from trainer.client import open_run

PROMPT = "a red circle"


class Demo(NamedTuple):
    """Links from the demo node."""

    model: Any
    dataset: Any
    optimizer: Any
    recipe: Any
    clip: Any
    vae: Any


def demo(g: Graph) -> Demo:
    node = g.add("FluxFFTDemo")
    return Demo(*(node.out(i) for i in range(6)))


def start(g: Graph, parts: Demo, name: str) -> Node:
    return g.add("FluxFFTStart", model=parts.model, dataset=parts.dataset, run_name=name,
                 if_different="stop and ask", optimizer=parts.optimizer, recipe=parts.recipe)


def train(g: Graph, parts: Demo, name: str, steps: int, **inputs: Any) -> Node:
    """Start and Train Steps; the latter's node."""
    return g.add("FluxFFTTrainSteps", run=start(g, parts, name), steps=steps, **inputs)


def with_previews(g: Graph, every: int = 0, prompts: str = PROMPT) -> Node:
    """Preview Settings of the demo's size."""
    return g.add("FluxFFTPreviewSettings", prompts=prompts, width=64, height=64, sampler_name="euler",
                 scheduler="simple", sampling_steps=4, guidance=1.0, cfg=1.0, preview_seed=7, every_n_steps=every)


def sample(g: Graph, model: Any, clip: Any, prefix: str) -> tuple[Node, Node]:
    """A plain KSampler on ``model``; the sampler's node, and the one that saves its latent."""
    text = g.add("CLIPTextEncode", clip=clip, text=PROMPT)
    guided = g.add("FluxGuidance", conditioning=text, guidance=1.0)
    empty = g.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    sampler = g.add("KSampler", model=model, positive=guided, negative=guided, latent_image=empty, seed=7, steps=4,
                    cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0)
    return sampler, g.add("SaveLatent", samples=sampler, filename_prefix=prefix)


def with_defaults(server: Server, g: Graph, kind: str, **inputs: object) -> Node:
    """A node of the graph as the canvas makes it: every widget at what the server says is its default."""
    known = server.get(f"/object_info/{kind}")[kind]["input"]
    given = {}
    for name, (of, *more) in {**known.get("required", {}), **known.get("optional", {})}.items():
        choices = of if isinstance(of, list) else (more[0] if more else {}).get("options")
        default = (more[0] if more else {}).get("default", choices[0] if choices else None)
        if default is not None:
            given[name] = default
    return g.add(kind, **{**given, **inputs})


def four_nodes(name: str, steps: int) -> Graph:
    g = Graph()
    model = g.add("FluxFFTModel", flux="flux_demo.safetensors", clip_l="demo_captions.safetensors",
                  t5="demo_captions.safetensors", vae="demo_vae.safetensors")
    data = g.add("FluxFFTDataset", folder="drawings", resolution=64, trigger_word="", bucket_step=16, upscale=True)
    run = g.add("FluxFFTStart", model=model, dataset=data, run_name=name, if_different="stop and ask")
    g.add("FluxFFTTrainSteps", run=run, steps=steps)
    return g


def delete(server: Server, name: str) -> None:
    """Delete a run as a user does: stop it, then remove its folder."""
    with open_run(server.home / name, launch=False) as client:
        client.stop()
    shutil.rmtree(server.home / name)

"""What can be chosen as a Flux on the canvas, and what is said of the rest; LoRAs as ComfyUI itself would add them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import torch
from headers import DEV, diffusers, fake, flux

from tests.comfyui.graphs import Demo, demo, train
from tests.comfyui.server import PACK, Graph, Install, Rejected, Server
from trainer.demo_data import write_demo
from trainer.flux.diffusers_names import diffusers_shapes
from trainer.flux.intake import open_source
from trainer.flux.variants import require_flux
from trainer.weights import Entry, TensorFile, entry, write_safetensors


def test_loras_are_those_that_comfyui_loads(install: Install, tmp_path: Path) -> None:
    command = [install.python, str(Path(__file__).parent / "inside" / "loras.py"), str(PACK), str(tmp_path)]
    done = subprocess.run(command, cwd=install.path, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[-1].removeprefix("RESULT "))
    assert len(found) == 7
    for spelling, values in found.items():
        assert values["changed"] > 0.01 and values["apart"] < 1e-6, (spelling, values)


def chosen(server: Server, file: str) -> str:
    """What the canvas shows when a file is chosen and the graph queued."""
    g = Graph()
    parts = demo(g)
    model = g.add("FluxFFTModel", flux=file, clip_l="from the link", t5="from the link", vae="from the link",
                  clip_override=parts.clip, vae_override=parts.vae)
    train(g, parts._replace(model=model.out(0)), "intake", 1)
    error = server.run(g).error
    assert "\n" not in error
    return error


def pickled(path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, path)


REFUSED = {
    "fp8.safetensors": (lambda p: fake(p, flux(DEV, "F8_E4M3")), "has fp8 weights"),
    "kontext.safetensors": (lambda p: fake(p, flux()), "is FLUX.1 Kontext (by its file name"),
    "fill.safetensors": (lambda p: fake(p, flux() | {"img_in.weight": ("BF16", (3072, 384))}), "is FLUX.1 Fill"),
    "nf4.safetensors": (lambda p: fake(p, diffusers() | {"proj_out.weight.absmax": ("F32", (9,))}), "has NF4 weights"),
    "nunchaku.safetensors": (lambda p: fake(p, {"transformer_blocks.0.qkv_proj.qweight": ("I8", (4, 4)),
                                                "transformer_blocks.0.qkv_proj.wscales": ("BF16", (4, 4))}),
                             "has SVDQuant weights"),
    "lora.safetensors": (lambda p: fake(p, {"lora_unet_double_blocks_0_img_mlp_0.lora_up.weight": ("BF16", (4, 4))}),
                         "is a LoRA, not a whole model"),
    "pickle.ckpt": (pickled, "is a pickled checkpoint"),
    "gguf.bin": (lambda p: p.write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 100), "is a GGUF file"),
    "html.safetensors": (lambda p: p.write_bytes(b"<!DOCTYPE html><html></html>"), "is a web page"),
    "lfs.safetensors": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "json.safetensors": (lambda p: p.write_bytes(b'{"error":"Invalid username or password."}'), "an error message"),
    "short.safetensors": (lambda p: fake(p, flux(), cut=10**9), "is cut short"),
    "empty.safetensors": (lambda p: p.write_bytes(b""), "is an empty file"),
    "x-00001-of-00002.safetensors": (lambda p: fake(p, diffusers()), "lacks x-00002-of-00002.safetensors"),
    "a name \u00e4\u4e2d.safetensors": (lambda p: p.write_bytes(b"text"), "is a text file"),
}  # fmt: skip


def test_files_are_named_for_what_they_are(server: Server) -> None:
    for name, (make, _) in REFUSED.items():
        make(server.base / "models/diffusion_models" / name)
    options = server.get("/object_info/FluxFFTModel")["FluxFFTModel"]["input"]["required"]["flux"]
    listed = options[1]["options"] if options[0] == "COMBO" else options[0]
    assert set(REFUSED) <= set(listed), "what ComfyUI lists is listed"
    assert listed.index("pickle.ckpt") > listed.index("x-00001-of-00002.safetensors"), "what can be read comes first"
    for name, (_, words) in REFUSED.items():
        error = chosen(server, name)
        assert words in error and name in error, (name, error)


def save_as_diffusers(source: Path, folder: Path) -> None:
    """The demo's Flux under diffusers' names, as a pipeline's folder in two parts."""
    folder.mkdir(parents=True)
    info = require_flux(source)
    assert info.flux is not None
    whole = dataclasses.replace(info, diffusers=True, prefix="")
    shapes = diffusers_shapes(info.flux)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    with open_source(source, info) as weights:
        for name, shape in weights.shapes.items():
            value, at = weights.read(name).view(shape), 0
            for rows in whole.rows(name, shape):
                tensors[rows.name][rows.start : rows.stop] = value[at : at + rows.stop - rows.start]
                at += rows.stop - rows.start
    names = sorted(tensors)
    parts = {f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for part, inside in parts.items():
        write_safetensors(folder / part, [entry(n, tensors[n]) for n in inside])
    table = {name: part for part, inside in parts.items() for name in inside}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    (folder.parent / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')


def trained(server: Server, g: Graph, parts: Demo, name: str) -> dict[str, torch.Tensor]:
    """The weights that a run of two steps ends with."""
    export = g.add("FluxFFTExport", run=train(g, parts, name, 2), filename=name, dtype="f32", overwrite=True)
    result = server.run(g)
    assert not result.error and result.outputs[export]
    with TensorFile(server.base / f"models/diffusion_models/{name}.safetensors") as file:
        return {key: file.load(key) for key in file.tensors}


def test_a_diffusers_folder_trains_as_its_file_does(server: Server) -> None:
    files = write_demo(server.base / "twin")
    save_as_diffusers(files["flux"], server.base / "models/diffusers/FLUX.1-tiny/transformer")
    g = Graph()
    plain = trained(server, g, demo(g), "plain_names")
    g = Graph()
    parts = demo(g)
    model = g.add("FluxFFTModel", flux="diffusers/FLUX.1-tiny", clip_l="from the link", t5="from the link",
                  vae="from the link", clip_override=parts.clip, vae_override=parts.vae)
    other = trained(server, g, parts._replace(model=model.out(0)), "diffusers_names")
    assert plain.keys() == other.keys() and all(torch.equal(plain[key], other[key]) for key in plain)


def test_a_lora_is_part_of_what_is_trained(server: Server) -> None:
    files = write_demo(server.base / "twin2")
    base = require_flux(files["flux"])
    name = "single_blocks.0.linear2"
    up, down = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((128, 2), (2, 640)))
    lora = {f"diffusion_model.{name}.lora_B.weight": up, f"diffusion_model.{name}.lora_A.weight": down}
    write_safetensors(server.base / "models/loras/style.safetensors", [entry(k, v) for k, v in lora.items()])
    with open_source(files["flux"], base) as source:
        merged = {k: source.read(k).view(shape) for k, shape in source.shapes.items()}
    merged[f"{name}.weight"] += 0.25 * (up @ down)
    entries = [Entry(k, "F32", tuple(v.shape), lambda v=v: iter((v,))) for k, v in merged.items()]
    write_safetensors(server.base / "models/diffusion_models/merged.safetensors", entries)

    def weights(kind: str) -> dict[str, torch.Tensor]:
        g = Graph()
        parts = demo(g)
        if kind == "lora":
            half = g.add("FluxFFTMergeLoRA", model=parts.model, lora="style.safetensors", strength=0.5)
            model = g.add("FluxFFTMergeLoRA", model=half, lora="style.safetensors", strength=-0.25)
        else:
            model = g.add("FluxFFTModel", flux="merged.safetensors", clip_l="from the link", t5="from the link",
                          vae="from the link", clip_override=parts.clip, vae_override=parts.vae)
        return trained(server, g, parts._replace(model=model.out(0)), f"by_{kind}")

    ours, wanted = weights("lora"), weights("file")
    for key, value in wanted.items():
        assert torch.allclose(ours[key], value, atol=1e-5), key

    g = Graph()
    parts = demo(g)
    model = g.add("FluxFFTMergeLoRA", model=parts.model, lora="style.safetensors", strength=1.0)
    train(g, parts._replace(model=model.out(0)), "by_lora", 3)
    error = server.run(g).error
    assert "model.loras was" in error and "style.safetensors' at 1" in error and "\n" not in error
    begins = next(node for node in g.values() if node["class_type"] == "FluxFFTStart")
    begins["inputs"]["if_different"] = "continue the run"
    assert not server.run(g).error
    kept = json.loads((server.home / "by_lora/config.json").read_text(encoding="utf-8"))["model"]["loras"]
    assert [lora["strength"] for lora in kept] == [0.5, -0.25], "the run's own LoRAs, which its weights hold already"
    assert server.steps("by_lora") == [1, 2, 3]
    write_safetensors(server.base / "models/loras/strange.safetensors", [entry("blocks.0.lora_A.weight", up)])
    g[model]["inputs"]["lora"] = "strange.safetensors"
    error = server.run(g).error
    assert "its key blocks.0.lora_A.weight belongs to no layer" in error and "\n" not in error
    g[model]["inputs"]["lora"] = "gone.safetensors"
    try:
        error = server.run(g).error  # servers before 0.8 do not check what is chosen
    except Rejected as refused:
        error = str(refused)
    assert "gone.safetensors" in error

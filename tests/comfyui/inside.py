"""Checks of the bridge that need ComfyUI's own classes: run by ComfyUI's interpreter, in its folder (see test_bridge).

``python inside.py PACK [NAME]`` prints one JSON object: the names of the checks that failed, and how.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from types import ModuleType
from typing import Any


def load_pack(where: str) -> ModuleType:
    """The pack under a name of its own, as ComfyUI loads it."""
    spec = importlib.util.spec_from_file_location("pack", f"{where}/__init__.py", submodule_search_locations=[where])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pack"] = module
    spec.loader.exec_module(module)
    return module


def tiny_clip() -> Any:
    """ComfyUI's Flux text path with its real tokenizers, over networks of two layers with random weights."""
    import comfy.sd
    import comfy.supported_models_base
    import comfy.text_encoders.flux
    import torch

    clip_l = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    t5 = {"d_model": 96, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}
    target = comfy.supported_models_base.ClipTarget(
        comfy.text_encoders.flux.FluxTokenizer, comfy.text_encoders.flux.flux_clip(dtype_t5=torch.float32))
    clip = comfy.sd.CLIP(target, model_options={"clip_l_model_config": clip_l, "t5xxl_model_config": t5,
                                                "dtype": torch.float32})
    generator = torch.Generator().manual_seed(0)
    for p in clip.cond_stage_model.parameters():
        p.data = torch.randn(p.shape, generator=generator) * (0.05 if p.ndim > 1 else 1.0)
    return clip


def proxy(flux: dict[str, Any] | None = None, predict: Any = None) -> Any:
    """A proxy MODEL whose velocity is zero unless given, and what it was asked."""
    from pack.nodes import bridge_model

    flux = {"context_in_dim": 96, "vec_in_dim": 64, "guidance_embed": True, **(flux or {})}
    return bridge_model.proxy_model(flux, predict or (lambda x, *_: x * 0))


def sample(model: Any, **changes: Any) -> Any:
    import torch
    from pack.nodes import bridge_model

    text = (torch.ones(7, 96), torch.ones(64))
    arguments = {"positive": text, "negative": text, "width": 64, "height": 48, "seed": 1, "steps": 3, "cfg": 1.0,
                 "sampler": "euler", "scheduler": "simple", "guidance": 2.5, **changes}
    return bridge_model.sample(model, **arguments)


def refused(call: Any) -> str:
    """The line of the ``ValueError`` that ``call`` raises."""
    try:
        call()
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("nothing was refused")


def check_text_has_the_length_asked_for() -> None:
    import torch
    from pack.nodes import bridge

    clip = tiny_clip()
    for length in (512, 256):
        context, pooled = bridge.encode_text(clip, "a cat", length)
        assert context.shape == (length, 96) and pooled.shape == (64,)
        assert (context.dtype, pooled.dtype) == (torch.bfloat16, torch.float32)
    long, _ = bridge.encode_text(clip, "word " * 1000, 256)
    assert long.shape == (256, 96)
    # As ComfyUI itself encodes a short text, which it pads to 256.
    plain, plain_pooled = clip.encode_from_tokens(clip.tokenize("a cat"), return_pooled=True)
    ours, pooled = bridge.encode_text(clip, "a cat", 256)
    assert plain.shape[1] == 256
    assert torch.equal(ours, plain[0].bfloat16()) and torch.equal(pooled, plain_pooled[0])


def check_texts_in_a_batch_are_encoded_as_each_alone() -> None:
    import torch
    from pack.nodes import bridge, bridge_text

    clip = tiny_clip()
    texts = ["a cat", "", "a (cat:1.5), " * 40, "word " * 300]
    for length in (512, 256):
        found = bridge_text.encode_texts(clip, texts, length)
        assert len(found) == 4
        for (context, pooled), text in zip(found, texts, strict=True):
            alone, alone_pooled = bridge.encode_text(clip, text, length)
            assert context.shape == alone.shape == (length, 96) and pooled.shape == (64,)
            assert (context.dtype, pooled.dtype) == (torch.bfloat16, torch.float32)
            assert torch.allclose(context.float(), alone.float(), atol=0.02, rtol=0.02)
            assert torch.allclose(pooled, alone_pooled, atol=1e-5)
            assert context.untyped_storage().nbytes() == context.nbytes, "no view of the whole batch"
    assert not torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])

    class Other:  # some pack's own CLIP: one after the other
        tokenize, encode_from_tokens = staticmethod(clip.tokenize), staticmethod(clip.encode_from_tokens)

    one, two = bridge_text.encode_texts(Other(), texts[:2], 256)
    assert torch.allclose(one[0].float(), found[0][0].float(), atol=0.02) and two[0].shape == (256, 96)


def check_tokens_are_counted_as_they_are_cut() -> None:
    from pack.nodes import bridge_text

    clip = tiny_clip()
    for count in (bridge_text.token_counter(clip), bridge_text.token_counter()):
        assert count("") == 1, "the end token"
        words = count("word " * 300)
        assert words == 301
        assert count("word " * 300 + "word") == words + 1
        assert count("(word)") > count("word")


def check_scans_are_kept_until_a_file_changes() -> None:
    import os
    import tempfile

    from pack.nodes import scans
    from pack.trainer.config import DatasetConfig
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        for name in "ab":
            Image.new("RGB", (64, 64)).save(f"{folder}/{name}.png")
        config, calls = DatasetConfig(folder=folder, resolution=64, bucket_step=16), []

        def look(other: Any = config) -> Any:
            return scans.look(other, lambda done, found: calls.append(done))

        first = look()
        assert calls == [1, 2] and look() is first and calls == [1, 2]
        assert look(DatasetConfig(folder=folder, resolution=128, bucket_step=16)) is not first
        with open(f"{folder}/a.txt", "w") as f:
            f.write("new")
        assert look() is not first and look().samples[0].caption == "new"
        os.remove(f"{folder}/a.txt")
        scans.MOST_SAMPLES = 3
        look()
        assert len(scans._kept) == 1
    for text in (folder, ""):
        assert "does not exist" in refused(lambda text=text: look(DatasetConfig(folder=text or folder)))


def check_a_long_text_ends_with_the_end_token() -> None:
    from pack.nodes import bridge

    tokens = [(n + 5, 1.0) for n in range(9)] + [(1, 1.0)]
    assert bridge.fixed_length(tokens, 6) == [(5, 1.0), (6, 1.0), (7, 1.0), (8, 1.0), (9, 1.0), (1, 1.0)]
    assert bridge.fixed_length(tokens, 12) == [*tokens, (0, 1.0), (0, 1.0)]
    assert bridge.fixed_length(tokens, 10) == tokens


def check_brackets_are_words_and_no_weights() -> None:
    import torch
    from pack.nodes import bridge

    clip = tiny_clip()
    weighted, _ = bridge.encode_text(clip, "a (cat:1.5)", 256)
    tokens = clip.tokenize(r"a \(cat:1.5\)")
    assert all(weight == 1.0 for _, weight in tokens["t5xxl"][0])
    plain, _ = bridge.encode_text(clip, "a cat:1.5", 256)
    assert not torch.equal(weighted, plain), "the brackets are in the text"


def check_pixels_become_model_space_latents() -> None:
    import comfy.sd
    import comfy.taesd.taesd
    import torch
    from pack.nodes import bridge

    net = comfy.taesd.taesd.TAESD(latent_channels=16)
    weights = {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) * 0.1 if v.ndim else v
               for k, v in net.state_dict().items()}
    vae = comfy.sd.VAE(sd=weights)
    pixels = torch.rand(2, 32, 48, 3, generator=torch.Generator().manual_seed(2))
    latents = bridge.encode_pixels(vae, pixels.clone())
    raw = vae.encode(pixels.clone())
    assert latents.shape == (2, 16, 4, 6) and latents.dtype == torch.float32
    assert torch.allclose(latents, (raw - 0.1159) * 0.3611, atol=1e-5)


def check_live_encoders_are_told_apart_by_what_they_compute() -> None:
    import comfy.sd
    import torch
    from pack.nodes.bridge_text import content_id

    one, two, three = tiny_clip(), tiny_clip(), tiny_clip()
    next(three.cond_stage_model.t5xxl.parameters()).data += 1
    assert content_id(one) == content_id(two) != content_id(three)
    layer, (rows, columns) = next((n, p.shape) for n, p in one.cond_stage_model.clip_l.named_parameters()
                                  if n.endswith("mlp.fc1.weight"))
    name = "lora_te_" + layer.removeprefix("transformer.").removesuffix(".weight").replace(".", "_")

    def with_lora(value: float, strength: float) -> str:
        lora = {f"{name}.lora_up.weight": torch.full((rows, 2), value),
                f"{name}.lora_down.weight": torch.ones(2, columns)}
        patched = comfy.sd.load_lora_for_models(None, two, lora, 0, strength)[1]
        assert patched.patcher.patches, "the LoRA fits"
        return content_id(patched)

    ids = [content_id(one), with_lora(1.0, 1.0), with_lora(2.0, 1.0), with_lora(1.0, 0.5)]
    assert len(set(ids)) == 4 and ids[1] == with_lora(1.0, 1.0) and content_id(two) == ids[0]


def check_the_proxy_asks_for_what_the_sampler_shows_it() -> None:
    import torch

    asked = []

    def predict(x: Any, timestep: Any, context: Any, pooled: Any, guidance: Any) -> Any:
        asked.append((x, timestep, context, pooled, guidance))
        return torch.ones_like(x)

    noise = torch.randn(1, 16, 6, 8, generator=torch.manual_seed(1))
    latent = sample(proxy(predict=predict), steps=4)
    assert latent.shape == (1, 16, 6, 8)
    levels = [float(t[1]) for t in asked]
    assert levels[0] == 1.0 and levels == sorted(levels, reverse=True) and 0 < levels[-1] < 1
    for x, timestep, context, pooled, guidance in asked:
        assert x.shape == (1, 16, 6, 8) and context.shape == (1, 7, 96) and pooled.shape == (1, 64)
        assert {t.dtype for t in (x, timestep, context, pooled, guidance)} == {torch.float32}
        assert {t.device.type for t in (x, timestep, context, pooled, guidance)} == {"cpu"}
        assert guidance.tolist() == [2.5]
    # A constant velocity of 1 leads from the noise at level 1 to noise - 1 in model space.
    assert torch.allclose(asked[0][0], noise, atol=1e-6)
    assert torch.allclose(latent, (noise - 1) / 0.3611 + 0.1159, atol=1e-4)


def check_a_flux_without_guidance_is_asked_without() -> None:
    asked = []

    def predict(x: Any, timestep: Any, context: Any, pooled: Any, guidance: Any) -> Any:
        asked.append((float(timestep), guidance))
        return x * 0

    sample(proxy({"guidance_embed": False}, predict), steps=4)
    assert [g for _, g in asked] == [None] * 4
    # schnell: no shift, so four steps are evenly spaced.
    assert [round(t, 3) for t, _ in asked] == [1.0, 0.75, 0.5, 0.25]


def check_the_proxy_takes_no_memory() -> None:
    model = proxy()
    assert model.model.memory_required([2, 16, 128, 128]) == 0
    assert model.model_size() < 100_000, "the schedule's table, no weights"
    assert list(model.model.diffusion_model.parameters()) == []
    assert type(model.clone()) is type(model)


def check_what_cannot_be_honoured_is_refused() -> None:
    import comfy.sd
    import torch

    model = proxy()
    assert "LoRA" in refused(lambda: comfy.sd.load_lora_for_models(
        model, None, {"diffusion_model.img_in.lora_A.weight": torch.zeros(2, 64),
                      "diffusion_model.img_in.lora_B.weight": torch.zeros(64, 2)}, 1.0, 0.0))
    assert "attention" in refused(lambda: model.clone().set_model_attn1_replace(lambda *a: a, "double_block", 0))
    assert "patch" in refused(lambda: model.clone().set_model_attn1_patch(lambda *a: a))
    for key, what, value in (("patches", "patches", {"attn1_patch": [print]}),
                             ("patches_replace", "attention", {"dit": {("double_block", 0): print}}),
                             ("optimized_attention_override", "attention", print),
                             ("rope_options", "RoPE", {"scale_x": 2})):
        patched = model.clone()
        patched.model_options.setdefault("transformer_options", {})[key] = value
        assert what in refused(lambda patched=patched: sample(patched))
    net = model.model.diffusion_model
    inputs = (torch.zeros(1, 16, 6, 8), torch.ones(1), torch.zeros(1, 7, 96), torch.zeros(1, 64), torch.ones(1))
    assert "ControlNet" in refused(lambda: net(*inputs, control={"input": []}))
    assert "reference" in refused(lambda: net(*inputs, ref_latents=[inputs[0]]))
    assert "mask" in refused(lambda: net(*inputs, attention_mask=torch.ones(1, 1)))
    assert "guidance" in refused(lambda: net(*inputs[:4], None))
    wide = (torch.ones(7, 128), torch.ones(64))
    assert "128" in refused(lambda: sample(model, positive=wide, negative=wide))


def check_a_model_without_weights_is_neither_saved_nor_merged() -> None:
    import os
    import tempfile

    import comfy.sd
    import comfy_extras.nodes_model_merging as merging

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "saved.safetensors")
        assert "saving" in refused(lambda: comfy.sd.save_checkpoint(path, proxy()))
        assert not os.path.exists(path)
    assert "merging" in refused(lambda: merging.ModelMergeSimple().merge(proxy(), proxy(), 0.5))


def check_what_leaves_a_node_is_one_line_that_can_be_sent() -> None:
    import errno
    import logging

    from comfy_api.latest import io
    from pack.nodes import words

    logging.disable(logging.CRITICAL)
    name = "mod\udce9.safetensors"

    def said(error: Exception, **inputs: Any) -> tuple[type, str]:
        class Node(io.ComfyNode):
            @classmethod
            def execute(cls, **_: Any) -> Any:
                try:
                    raise OSError(name)  # what it came of is no better
                except OSError:
                    raise error  # noqa: B904

        try:
            words.guarded(Node).execute(**inputs)
        except Exception as told:
            text = str(told)
            traceback.format_exc().encode()
            assert "\n" not in text and text.strip() and "Traceback" not in text, text
            return type(told), text
        raise AssertionError("nothing was raised")

    assert said(ValueError(f"no file {name}")) == (ValueError, "no file mod\\udce9.safetensors")
    assert said(RuntimeError("two\nlines"))[1] == "two lines"
    kind, text = said(OSError(errno.ENOSPC, "No space left on device", "/a/b/file"))
    assert kind is OSError and "/a/b is full" in text and "free" in text
    assert "is full" in said(OSError("[Errno 28] No space left on device: '/a/b/file'"))[1]
    long = "x" * 300
    kind, text = said(OSError(errno.ENAMETOOLONG, "File name too long", f"/a/{long}"), run_name=long)
    assert text.startswith("run_name") and "too long" in text and len(text) < 200
    for code in (errno.EROFS, errno.EACCES, errno.EEXIST):
        assert said(OSError(code, "no", "/a/b"), folder="/a")[1].startswith("folder is '/a'")
    assert said(ValueError("embedded null byte"), folder="a\0b")[1].startswith("folder is 'a\\x00b'")
    encoding = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    assert said(encoding, folder="\ud800")[1].startswith("folder is '\\ud800'")
    assert "damaged" in said(KeyError("samples"))[1]
    assert said(RuntimeError("Traceback (most recent call last)\n  x\nValueError: no\n"))[1] == "ValueError: no"
    assert said(AssertionError())[1]

    class Shown(io.ComfyNode):
        @classmethod
        def execute(cls) -> Any:
            return io.NodeOutput(1, ui={"text": (name,)})

        @classmethod
        def validate_inputs(cls, run_name: str | None = None) -> Any:
            return name

    import inspect

    shown = words.guarded(Shown)
    assert shown.execute().ui == {"text": ("mod\\udce9.safetensors",)}
    assert shown.validate_inputs() == "mod\\udce9.safetensors"
    assert "run_name" in inspect.getfullargspec(shown.validate_inputs).args


def check_preview_settings_are_numbers_that_can_be_sampled() -> None:
    import dataclasses
    import math

    from pack.nodes import handles

    good = handles.PreviewSettings(prompts=("a",), width=64, height=64, sampler="euler", scheduler="simple",
                                   sampling_steps=1, guidance=1, cfg=1.0, preview_seed=0, every_n_steps=0)
    for name, values in {"guidance": (math.nan, math.inf, -1, None), "cfg": (math.nan, -math.inf, "2"),
                         "width": (0, -16, 8208, 100, 64.0), "height": (0, 8, True), "sampling_steps": (0, -1),
                         "every_n_steps": (-1, 0.5), "preview_seed": (-1,), "prompts": ((),)}.items():
        for value in values:
            assert name in refused(lambda name=name, value=value: dataclasses.replace(good, **{name: value}))


def check_export_names_that_do_not_do_are_told() -> None:
    import os
    import tempfile

    import folder_paths
    from pack.nodes import bridge

    with tempfile.TemporaryDirectory() as folder:
        root = os.path.realpath(os.path.join(folder, "diffusion_models"))
        os.mkdir(root)
        before = folder_paths.folder_names_and_paths["diffusion_models"]
        folder_paths.folder_names_and_paths["diffusion_models"] = ([root], before[1])
        try:
            open(os.path.join(root, "file"), "w").close()
            os.mkdir(os.path.join(root, "taken.safetensors"))
            for name in ("x" * 300, "a\0b", "a\ud800", "file/in", "CON", "sub/nul.safetensors", "lpt1", "taken", "a/",
                         "", "..", "../out", "x" * 150 + "/" + "\u00e9" * 150, "/".join("y" * 190 for _ in range(40))):
                line = refused(lambda name=name: bridge.export_path(name))
                assert line.startswith("filename is ") and len(line) < 600, line
            assert str(bridge.export_path("sub/new")) == os.path.join(root, "sub", "new.safetensors")
            assert str(bridge.export_path("console.SAFETENSORS")) == os.path.join(root, "console.safetensors")
            assert bridge.export_path("x" * 100 + "_000500").name == "x" * 100 + "_000500.safetensors"
        finally:
            folder_paths.folder_names_and_paths["diffusion_models"] = before


def check_wrappers_of_other_packs_are_called() -> None:
    import comfy.patcher_extension

    seen = []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return executor(*args, **kwargs)

    model = proxy()
    model.add_wrapper(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, wrapper)
    sample(model)
    assert len(seen) == 3


def check_an_error_in_the_worker_reaches_the_user() -> None:
    def predict(*_: Any) -> Any:
        raise ValueError("the run is at step 5")

    assert "step 5" in refused(lambda: sample(proxy(predict=predict)))


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


def check_cancel_is_heard_between_short_predictions() -> None:
    import comfy.model_management
    from pack.nodes import registry

    asked = []

    def predict(x: Any, *_: Any) -> Any:
        asked.append(1)
        if len(asked) == 3:
            comfy.model_management.interrupt_current_processing()
        return registry.cancellable(lambda: x * 0)

    try:
        sample(proxy(predict=predict), steps=50)
        raise AssertionError("sampling went on")
    except comfy.model_management.InterruptProcessingException:
        assert len(asked) <= 4


def check_the_worker_parks_at_the_end_of_sampling() -> None:
    from pack.nodes import bridge_model

    flux, order = {"context_in_dim": 96, "vec_in_dim": 64, "guidance_embed": True}, []

    def predict(x: Any, *_: Any) -> Any:
        order.append("predicted")
        return x * 0

    model = bridge_model.proxy_model(flux, predict, lambda: order.append("parked"))
    sample(model.clone(), steps=3)
    assert order == ["predicted"] * 3 + ["parked"]


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


def _raise() -> None:
    raise ValueError("three")


def check_kept_objects_are_few() -> None:
    from pack.nodes import bridge

    keys = [bridge.keep(thing := object()) for _ in range(bridge.KEPT + 3)]
    assert bridge.kept(keys[-1], "CLIP") is thing
    assert "CLIP" in refused(lambda: bridge.kept("gone", "CLIP"))
    assert len(bridge._kept) == bridge.KEPT
    assert bridge.keep(None) == ""


CHECKS = {name: function for name, function in list(globals().items()) if name.startswith("check_")}


def main() -> None:
    pack, wanted = sys.argv[1], sys.argv[2:] or list(CHECKS)
    sys.path.insert(0, ".")
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch

    import nodes  # noqa: F401

    load_pack(pack)
    failed = {}
    with torch.inference_mode():  # as the executor runs nodes
        for name in wanted:
            try:
                CHECKS[name]()
            except BaseException:
                failed[name] = traceback.format_exc()
    print("RESULT " + json.dumps({"failed": failed, "checks": list(CHECKS)}))


if __name__ == "__main__":
    main()

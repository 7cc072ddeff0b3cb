"""What the checks inside of ComfyUI share: the pack as ComfyUI loads it, and small parts of ComfyUI's own."""

from __future__ import annotations

import importlib.util
import sys
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

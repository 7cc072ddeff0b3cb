"""ComfyUI's text encoders: captions in batches, how many tokens a text has, and what tells live encoders apart.

Tried on 0.3.64 and 0.33.0, on a CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import bridge

if TYPE_CHECKING:
    from torch import Tensor


def encode_texts(clip: Any, texts: Sequence[str], length: int) -> list[tuple[Tensor, Tensor]]:
    """``bridge.encode_text`` of several texts, T5 in one batch where the CLIP is a FLUX.1's.

    ComfyUI encodes the sections of one long prompt as a batch and lays them behind each other; of CLIP-L's pooled
    outputs it keeps that of the first.
    """
    import torch

    model: Any = getattr(clip, "cond_stage_model", None)
    if len(texts) == 1 or not (hasattr(model, "clip_l") and hasattr(model, "t5xxl")):
        return [bridge.encode_text(clip, text, length) for text in texts]
    tokens = [clip.tokenize(bridge.escaped(text)) for text in texts]
    batch = {**tokens[0], "t5xxl": [bridge.fixed_length(t["t5xxl"][0], length) for t in tokens]}
    context, pooled = clip.encode_from_tokens(batch, return_pooled=True)
    contexts = context.view(len(texts), length, -1).to("cpu", torch.bfloat16)
    others = [model.clip_l.encode_token_weights(t["l"])[1] for t in tokens[1:]]
    return [(c.clone(), p[0].float().cpu()) for c, p in zip(contexts, [pooled, *others], strict=True)]


def token_counter(clip: Any = None) -> Callable[[str], int]:
    """What counts the T5 tokens of a text, its end included: those of ``clip``, or FLUX.1's own without its weights."""
    if clip is not None:
        tokenize = clip.tokenize
    else:
        import comfy.text_encoders.flux
        import folder_paths

        tokenizer = comfy.text_encoders.flux.FluxTokenizer(
            embedding_directory=folder_paths.get_folder_paths("embeddings"))
        tokenize = tokenizer.tokenize_with_weights

    def count(text: str) -> int:
        sections = tokenize(bridge.escaped(text)).get("t5xxl", [])
        return sum(not (isinstance(token[0], int) and token[0] == 0) for section in sections for token in section)

    return count


def content_id(thing: Any) -> str:
    """Tells one live CLIP or VAE from another by what it computes: a hash of its weights' shapes and first values, and
    of what is added to them (a LoRA, say), which ComfyUI keeps apart and puts in only while they are used."""
    own = getattr(thing, "flux_fft_id", None)
    if own is not None:
        return own
    digest = hashlib.sha256()
    patcher = getattr(thing, "patcher", None)
    unpatched = getattr(patcher, "backup", {})
    for name, tensor in sorted(thing.get_sd().items()):
        _add(digest, (name, getattr(unpatched.get(name), "weight", tensor)))
    patches, layer = getattr(patcher, "patches", {}), getattr(thing, "layer_idx", None)
    if patches or layer is not None:
        _add(digest, (sorted(patches.items(), key=lambda item: str(item[0])), layer))
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Have a hash cover a value: of tensors their shapes and first values, of ComfyUI's adapters their tensors."""
    if hasattr(value, "flatten"):
        digest.update(str(tuple(value.shape)).encode())
        digest.update(value.flatten()[:16].float().cpu().numpy().tobytes())
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for each in value:
            _add(digest, each)
    elif hasattr(value, "weights"):
        _add(digest, (type(value).__name__, value.weights))
    elif isinstance(value, str | int | float | None):
        digest.update(f"{value!r};".encode())
    else:  # a function that is applied to a patch, say
        digest.update(f"{type(value).__name__};".encode())

"""Whether tensors are those of a whole Flux.1 that can be trained, and which one. Without torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..header import TensorInfo
from .diffusers_names import as_ours, diffusers_shapes, theirs
from .info import USE, WHERE, FileInfo, refused
from .kinds import Refusal
from .sizes import HEAD_DIM, shapes_of, sizes_of

DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
"""The dtypes that can be trained, and what we call them."""
STRAY = 4096
"""Unknown tensors with fewer elements than this in all are leftovers; with more, they are layers of another model."""
_WHOLE = f"get the whole file; else {USE}{WHERE}"


def whole_flux(info: FileInfo, inside: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> FileInfo:
    """``info`` filled in, if the tensors are those of a whole Flux.1 to be trained; else why not."""
    path = info.path
    try:
        flux = sizes_of(as_ours(inside) if info.diffusers else inside)
    except KeyError as error:
        name = theirs(error.args[0]) if info.diffusers else error.args[0]
        return refused(path, "incomplete", f"is no whole Flux (it lacks a well-formed {name})", _WHOLE)
    channels = flux["in_channels"] // 4
    if channels == 96:
        return refused(path, "fill", "is FLUX.1 Fill (96 input channels, not 16), which cannot be trained yet")
    if channels == 32:
        return refused(path, "control", "is FLUX.1 Canny or Depth (32 input channels, not 16), which cannot be trained"
                                         " yet")  # fmt: skip
    if channels != 16 or flux["out_channels"] != 64:
        return refused(path, "other", f"is a variant of Flux with {channels} input channels instead of 16")
    if flux["hidden_size"] % HEAD_DIM or flux["mlp_ratio"] != 4:
        return refused(path, "other", f"is a variant of Flux of unknown sizes (width {flux['hidden_size']})")
    if refusal := _not_its_tensors(info, inside, flux):
        return refusal
    if refusal := _kontext(Path(path), metadata):
        return refused(path, *refusal)
    shapes = _shapes(info, flux)
    count = Counter[str]()
    for name in shapes:
        count[inside[name].dtype] += inside[name].numel
    unknown = sorted(set(count) - set(DTYPES))
    if unknown:
        return refused(path, "quantized", f"has weights of type {', '.join(unknown)}, which cannot be trained")
    variant, note = _variant(Path(path), bool(flux["guidance_embed"]), metadata)
    steps = metadata.get("flux_fft.total_steps") or metadata.get("flux_fft.steps", "")
    return replace(
        info, trainable=True, variant=variant, note=note, dtype=DTYPES[count.most_common(1)[0][0]],
        params=sum(count.values()), flux=flux,
        parent_steps=int(steps) if re.fullmatch(r"[0-9]{1,15}", steps) else 0,
    )  # fmt: skip


def _shapes(info: FileInfo, flux: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names, without prefix, and shapes of all that the file has to hold."""
    if info.diffusers:
        return diffusers_shapes(flux)
    return {info.tensor_name(name)[len(info.prefix) :]: shape for name, shape in shapes_of(flux).items()}


def _not_its_tensors(info: FileInfo, inside: Mapping[str, TensorInfo], flux: dict[str, Any]) -> FileInfo | None:
    """The refusal of a file that lacks tensors of a Flux of these sizes, or has others."""
    shapes = _shapes(info, flux)
    missing = [name for name in shapes if name not in inside]
    if missing:
        lack = f"is no whole Flux (it lacks {len(missing)} of {len(shapes)} tensors: {missing[0]})"
        return refused(info.path, "incomplete", lack, _WHOLE)
    wrong = next((name for name, shape in shapes.items() if inside[name].shape != shape), None)
    if wrong:
        there = f"{list(inside[wrong].shape)} instead of {list(shapes[wrong])}"
        return refused(info.path, "other", f"is no Flux.1: {wrong} has the shape {there}")
    extra = [name for name in inside if name not in shapes]
    if sum(inside[name].numel for name in extra) >= STRAY:
        return refused(info.path, "other", f"is a variant of Flux with layers that are unknown here ({extra[0]})")
    return None


_ABOUT = ("modelspec.architecture", "modelspec.title", "ss_base_model_version", "ss_sd_model_name", "general.name")
_DEDISTILLED = re.compile(r"de.?distil|undistil|dedist", re.IGNORECASE)


def _kontext(path: Path, metadata: Mapping[str, str]) -> Refusal | None:
    """Kontext has dev's tensors exactly: only what the file says of itself, or is called, tells it."""
    if any("kontext" in metadata.get(key, "").lower() for key in _ABOUT):
        return "kontext", "is FLUX.1 Kontext (by its metadata), which cannot be trained yet"
    if "kontext" in path.name.lower() and "flux_fft.steps" not in metadata:  # a run of ours may be called so
        return "kontext", "is FLUX.1 Kontext (by its file name: rename it if it is not), which cannot be trained yet"
    return None


def _variant(path: Path, guidance: bool, metadata: Mapping[str, str]) -> tuple[str, str]:
    """The variant, and what was concluded from a hint."""
    about = " ".join(metadata.get(key, "") for key in _ABOUT)
    if guidance:
        for text, source in ((about, "metadata"), (path.name, "file name")):
            if "krea" in text.lower():
                return "dev", f"FLUX.1 Krea dev, by its {source}"
        return "dev", ""
    for text, source in ((about, "metadata"), (path.name, "file name")):
        if "schnell" in text.lower():
            break
        if _DEDISTILLED.search(text) or re.search(r"flux[-._]?1[-._]dev\b", text.lower()):
            return "de-distilled", f"a dev without guidance, not schnell, by its {source}"
    return "schnell", ""

"""What file is this? Reads headers only, without torch, and says in one line why a file cannot be trained.

``folders.py`` finds the files of a model, ``kinds.py`` names what is no Flux, ``whole.py`` checks what is one against
``sizes.py`` and ``diffusers_names.py``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..header import Header, NotSafetensors, Truncated, read_header
from . import kinds
from .fingerprint import fingerprint
from .folders import Located, locate
from .info import USE, FileInfo, one_line, refused
from .whole import whole_flux

__all__ = ["FileInfo", "fingerprint", "inspect_file", "require_flux", "text_length"]

MOST = 20_000
"""More tensors than any Flux has, its text encoders and VAE included."""
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "")
"""What may stand before the names: all-in-one checkpoints, ComfyUI's and diffusers' own saves, or nothing."""


def require_flux(path: str | os.PathLike[str]) -> FileInfo:
    """``inspect_file`` of a Flux that can be trained; of another, raises ``ValueError`` with its reason (one line)."""
    info = inspect_file(path)
    if not info.trainable:
        raise ValueError(info.reason)
    return info


def text_length(info: FileInfo) -> int:
    """Tokens of a T5 caption: 256 for schnell, 512 for the others."""
    return 256 if info.variant == "schnell" else 512


def inspect_file(path: str | os.PathLike[str]) -> FileInfo:
    """Say what a file or folder is, from its first bytes, headers and name. Never raises for a file's sake."""
    info = _inspect(path)
    return replace(info, reason=one_line(info.reason), note=one_line(info.note))


def _inspect(path: str | os.PathLike[str]) -> FileInfo:
    try:
        if refusal := kinds.by_name(Path(path)):
            return refused(path, *refusal)
        found = locate(Path(path))
        if refusal := _by_place(Path(path), found):
            return refused(path, *refusal)
        for part in found.files:
            if refusal := kinds.by_first_bytes(part):
                return refused(part if len(found.files) > 1 else path, *refusal)
        header = _joined(found)
        info = _by_header(path, header)
        return info if info.trainable else replace(info, **_size(header))
    except Truncated as error:
        if part := kinds.downloading(Path(path)):
            return refused(path, "downloading", f"is still being downloaded ({part} is beside it): wait for that")
        kind, reason = "truncated", str(error) + kinds.growing(Path(path))
    except NotSafetensors as error:
        kind, reason = "other", f"{error}; {USE}"
    except (FileNotFoundError, NotADirectoryError):
        gone = "is a link to a file that is gone" if os.path.islink(path) else "does not exist"
        kind, reason = "missing", f"{path} {gone}: choose a Flux .safetensors file"
        if part := kinds.downloading(Path(path)):
            kind, reason = "downloading", f"{path} does not exist yet: {part} is a download that is not finished"
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        problem = getattr(error, "strerror", None) or error
        kind, reason = "unreadable", f"{path} cannot be read ({problem}): check the path and its permissions"
    return FileInfo(path=str(path), kind=kind, reason=reason)


def _by_place(path: Path, found: Located) -> kinds.Refusal | None:
    """What the files beside the weights, or their absence, say."""
    if found.pipeline and (refusal := _of_pipeline(found.pipeline)):
        return refusal
    if found.missing:
        some = f"{found.missing[0]}{' and others' if len(found.missing) > 1 else ''}"
        return "incomplete", f"is a model in {len(found.missing) + len(found.files)} parts and lacks {some}:" \
                             f" put {'them' if len(found.missing) > 1 else 'it'} into the same folder"  # fmt: skip
    if path.is_dir() and found.network not in ("", "FluxTransformer2DModel"):
        return "other", f"holds a {found.network} (by its config.json), not a Flux"
    if path.is_dir() and found.quantized:
        return "quantized", f"has weights quantized by {found.quantized} (by its config.json), which cannot be trained"
    if found.files:
        return None
    if not path.is_dir():
        return "text", "is an index that names no files: choose the .safetensors file itself"
    inner = path / "transformer"
    inside = sorted(os.listdir(inner if inner.is_dir() else path))
    if any(name.endswith(".bin") for name in inside):
        return "pickle", "is a folder of pickled weights (.bin), which can run code when opened and are not read"
    if inner.is_dir():
        return "folder", "is a diffusers folder without weights in its folder transformer: download it whole"
    several = [n for n in inside if n.lower().endswith((".safetensors", ".sft")) and (path / n).is_file()]
    if several:
        largest = max(several, key=lambda name: os.path.getsize(path / name))
        return "folder", f"is a folder with several .safetensors files: choose one of them, such as {largest}"
    return "folder", "is a folder with no .safetensors weights: choose a Flux file, or the folder with its" \
                     " model_index.json"  # fmt: skip


def _of_pipeline(name: str) -> kinds.Refusal | None:
    by = f"(by its model_index.json: {name})"
    if "Kontext" in name:
        return "kontext", f"is FLUX.1 Kontext {by}, which cannot be trained yet"
    if "Flux2" in name:
        return "flux2", f"is FLUX.2 {by}, whose architecture is another and cannot be trained yet"
    if "Chroma" in name:
        return "chroma", f"is Chroma {by}, whose architecture is another and cannot be trained yet"
    return None if "Flux" in name else ("other", f"is another model than Flux {by}")


def _joined(found: Located) -> Header:
    """One header of all parts; the places in it are those within the tensor's own file."""
    headers = [read_header(file) for file in found.files]
    if len(headers) == 1:
        return headers[0]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    metadata = {key: value for header in headers for key, value in header.metadata.items()}
    return Header(tensors, metadata, 0, sum(header.size for header in headers))


_BLOCK = re.compile(r"(double|single)_blocks\.\d+\.")
_DIFFUSERS_BLOCK = re.compile(r"(single_)?transformer_blocks\.\d+\.(attn\.|norm1_context\.)")
_OTHER_MODELS = ("vae.", "first_stage_model.", "text_encoders.", "cond_stage_model.", "conditioner.")


def _size(header: Header) -> dict[str, Any]:
    """``dtype`` and ``params`` of a file that is no Flux to train: of all that it holds."""
    count = Counter[str]()
    for tensor in header.tensors.values():
        count[tensor.dtype] += tensor.numel
    most = count.most_common(1)
    return {"dtype": most[0][0].lower() if most else "", "params": count.total()}


def _by_header(path: str | os.PathLike[str], header: Header) -> FileInfo:
    names = header.tensors
    if called := kinds.lora(names):
        ours = "choose the model that it was made for, and add it to that with Merge LoRA; else "
        instead = USE if "another model" in called else ours + USE
        return refused(path, "lora", f"is {called}, not a whole model", instead)
    if len(names) > MOST:
        return refused(path, "other", f"holds {len(names):,} tensors, and no Flux has so many")
    layout = _layout(names)
    if layout is None:
        return refused(path, *(kinds.quantized(names, {}) or kinds.other_family(names) or kinds.other(names)))
    prefix, diffusers = layout
    inside = {name[len(prefix) :]: t for name, t in names.items() if name.startswith(prefix)}
    if not prefix:
        inside = {name: t for name, t in inside.items() if not name.startswith(_OTHER_MODELS)}
    if refusal := kinds.other_family(inside) or kinds.quantized(inside, header.metadata):
        return refused(path, *refusal)
    suffix = "weight" if any(name.endswith("_norm.weight") for name in inside) else "scale"
    all_in_one = any(name.startswith(_OTHER_MODELS) for name in names)
    info = FileInfo(path=str(path), kind="flux", prefix=prefix, norm_suffix=suffix, diffusers=diffusers,
                    all_in_one=all_in_one)  # fmt: skip
    return whole_flux(info, inside, header.metadata)


def _layout(names: Collection[str]) -> tuple[str, bool] | None:
    """What stands before the names, and whether they are diffusers'; None: there are no blocks of a Flux."""
    for diffusers, block in ((False, _BLOCK), (True, _DIFFUSERS_BLOCK)):
        for prefix in PREFIXES:
            if any(name.startswith(prefix) and block.match(name, len(prefix)) for name in names):
                ours = not diffusers or _may_be_flux({name.removeprefix(prefix) for name in names})
                return (prefix, diffusers) if ours else None
    return None


def _may_be_flux(names: Collection[str]) -> bool:
    """Whether diffusers' names of a transformer are a Flux's: others have ``transformer_blocks`` too."""
    if any(name.startswith(("joint_transformer_blocks.", "pos_embed.")) for name in names):
        return False
    return any(name.startswith(("single_transformer_blocks.", "x_embedder.")) for name in names)

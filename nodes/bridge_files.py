"""Which models there are to choose from, by ComfyUI's ``folder_paths``. The third part of ``bridge.py``.

Tried on 0.3.64 and 0.33.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

FLUX_KINDS = ("diffusion_models", "checkpoints")
EXPORTED_KINDS = ("diffusion_models", "checkpoints", "loras")
FIRST = (".safetensors", ".sft")
"""What can be read comes first; the rest is there too, so that choosing it says what it is."""
_DIFFUSERS = "diffusion_pytorch_model"


def flux_files() -> list[str]:
    """Names of what may be a Flux: files of models/diffusion_models and models/checkpoints, folders of
    models/diffusers."""
    import folder_paths

    names = [name for kind in FLUX_KINDS for name in folder_paths.get_filename_list(kind)]
    readable = [name for name in names if name.lower().endswith(FIRST)]
    folders = sorted(name for name, _ in _folders())
    return list(dict.fromkeys([*readable, *folders, *names]))


def listed_as(folder: str | None, file: str) -> dict[str, str] | None:
    """``kind`` of models folder, and the ``name`` under which its loader lists the file; None where none does."""
    import folder_paths

    for kind in EXPORTED_KINDS if folder else ():
        for root in folder_paths.get_folder_paths(kind):
            path, top = os.path.realpath(os.path.join(folder or "", file)), os.path.realpath(root)
            if path.startswith(os.path.join(top, "")):
                return {"kind": kind, "name": os.path.relpath(path, top)}
    return None


def flux_path(value: str) -> str:
    """Path of one of ``flux_files``. Raises ``ValueError`` (servers before 0.8 do not check V3 combos)."""
    import folder_paths

    for kind in FLUX_KINDS:
        path = folder_paths.get_full_path(kind, value) if value else None
        if path:
            return os.path.abspath(path)
    for name, path in _folders():
        if name == value:
            return os.path.abspath(path)
    raise ValueError(f"flux is {value!r}: no such file in models/{' or models/'.join(FLUX_KINDS)}, nor a folder in "
                     "models/diffusers; choose another, or press R to refresh the list")


def lora_files() -> list[str]:
    """Names of the files in models/loras, those first that can be read."""
    import folder_paths

    names = folder_paths.get_filename_list("loras")
    return sorted(names, key=lambda name: not name.lower().endswith(FIRST))


def _folders() -> Iterator[tuple[str, str]]:
    """Name and path of each folder that diffusers made, below models/diffusers."""
    import folder_paths

    seen: set[str] = set()
    for root in folder_paths.get_folder_paths("diffusers"):
        for folder, inner, files in os.walk(root, followlinks=True):
            if os.path.realpath(folder) in seen:  # links may lead round in a circle
                inner.clear()
                continue
            seen.add(os.path.realpath(folder))
            if "model_index.json" in files or any(name.startswith(_DIFFUSERS) for name in files):
                inner.clear()  # its transformer is meant, and not named besides
                if folder != root:
                    yield os.path.join("diffusers", os.path.relpath(folder, root)).replace(os.sep, "/"), folder

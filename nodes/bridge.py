"""The one user of ComfyUI's internals, with ``bridge_model.py``, its other half.

Tried on 0.3.64 and 0.33.0, on a CPU, unless a line says otherwise.

Everything of ``comfy`` is imported inside functions, so that loading the pack costs ComfyUI nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trainer.config import check_name

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 8
"""How many CLIP and VAE objects that came over links are held at most."""
_kept: OrderedDict[str, Any] = OrderedDict()
_to_end = ""
"""The prompt that ``cancel`` is to end and that has not heard it."""
_ending = ""
"""The last prompt that is ending, or has."""

SUFFIX = ".safetensors"
LONGEST_NAME = 200
"""Bytes of a checkpoint's name: file systems take 255, and what is being written has a longer name."""
WINDOWS_DEVICE = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


# -- folders and files ---------------------------------------------------------------------------------------------


def home() -> Path:
    """Folder of the run directories: ``FLUX_FFT_HOME``, else ``flux_fft`` in ComfyUI's output folder."""
    import folder_paths

    chosen = os.environ.get("FLUX_FFT_HOME", "").strip()
    return Path(chosen or os.path.join(folder_paths.get_output_directory(), "flux_fft")).expanduser().resolve()


def run_dir(name: str) -> Path:
    """Directory of a run. Raises ``ValueError`` unless ``name`` is one plain folder name."""
    return home() / check_name(name)


def model_files(*kinds: str) -> list[str]:
    """Names of the .safetensors files in ComfyUI's model folders of these kinds, as its own loaders show them."""
    import folder_paths

    names: dict[str, None] = {}
    for kind in kinds:
        names |= dict.fromkeys(n for n in folder_paths.get_filename_list(kind) if n.lower().endswith(".safetensors"))
    return list(names)


def model_path(input_name: str, value: str, *kinds: str) -> str:
    """Path of a model file chosen by name. Raises ``ValueError`` (servers before 0.8 do not check V3 combos)."""
    import folder_paths

    for kind in kinds:
        path = folder_paths.get_full_path(kind, value) if value else None
        if path:
            return os.path.abspath(path)
    raise ValueError(f"{input_name} is {value!r}: no such file in models/{' or models/'.join(kinds)}; "
                     "choose another, or press R to refresh the list")


def input_path(folder: str) -> str:
    """A folder typed by the user; one that is not absolute starts in ComfyUI's input folder."""
    import folder_paths

    text = folder.strip().strip('"')
    if not text:
        raise ValueError("folder is empty: give the path of a folder of pictures")
    return os.path.abspath(os.path.join(folder_paths.get_input_directory(), os.path.expanduser(text)))


def export_path(filename: str, kind: str = "diffusion_models") -> Path:
    """Where an exported file called ``filename`` goes: inside ComfyUI's models folder ``kind``, sub-folders allowed.

    Raises ``ValueError`` where a name would not do on every system, or its folder cannot be made or written.
    """
    import folder_paths

    roots = [Path(p) for p in folder_paths.get_folder_paths(kind)]
    root = next((p for p in roots if p.name == kind), roots[0]).resolve()
    text = filename.strip().replace("\\", "/")
    stem = text[: -len(SUFFIX)] if text.lower().endswith(SUFFIX) else text
    shown = f"filename is {filename[:100]!r}{'...' if len(filename) > 100 else ''}"
    wrong = next(filter(None, map(_wrong_name, stem.split("/"))), "")
    if wrong:
        raise ValueError(f"{shown}: {wrong}; give a plain file name, it is placed in {root}")
    path = root / f"{stem}{SUFFIX}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.resolve()
        if not path.is_relative_to(root):  # a link leads out of it
            raise ValueError(f"{shown}: it leads out of {root}, choose another name")
        if path.is_dir():
            raise ValueError(f"{shown}: {path} is a folder, choose another name")
    except OSError as error:
        raise ValueError(f"{shown}: its folder cannot be made ({error.strerror}), choose another name") from None
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{shown}: nothing can be written into {path.parent}; change its permissions or choose another"
                         " name")
    return path


def _wrong_name(part: str) -> str:
    """What is wrong with a file's or folder's name on some system; empty: nothing."""
    if not part or part.strip(" .") != part:
        return "a name is empty, or has dots or spaces at its ends"
    if any(c in '<>:"|?*' or ord(c) < 32 or "\ud800" <= c <= "\udfff" for c in part):
        return "it has characters that a file's name cannot have"
    if len(part.encode()) > LONGEST_NAME:
        return "it is too long"
    return f"Windows keeps the name {part} for itself" if WINDOWS_DEVICE.fullmatch(part) else ""


def ui_image(path: Path) -> dict[str, str]:
    """How the canvas is told of a picture; one outside of ComfyUI's output folder is copied into its temp folder."""
    import shutil

    import folder_paths

    for kind, root in (("output", folder_paths.get_output_directory()), ("temp", folder_paths.get_temp_directory())):
        base = Path(root).resolve()
        if path.resolve().is_relative_to(base):
            folder = path.resolve().parent.relative_to(base)
            return {"filename": path.name, "subfolder": folder.as_posix(), "type": kind}
    target = Path(folder_paths.get_temp_directory()) / "flux_fft" / f"{path.parent.parent.name}_{path.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    return {"filename": target.name, "subfolder": "flux_fft", "type": "temp"}


# -- CLIP and VAE objects that came over links ---------------------------------------------------------------------


def keep(thing: Any) -> str:
    """Keep a live object, so that a handle can name it. Returns its key, or "" for None."""
    if thing is None:
        return ""
    key = str(id(thing))  # held here, so its id belongs to no other object
    _kept[key] = thing
    _kept.move_to_end(key)
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return key


def kept(key: str, what: str) -> Any:
    """The object kept under ``key``. Raises ``ValueError`` if it is gone."""
    if key not in _kept:
        raise ValueError(f"the {what} that was connected is no longer there: change the {what} loader or restart the "
                         "graph so that it is loaded again, or choose a file instead")
    return _kept[key]


# -- the executor --------------------------------------------------------------------------------------------------


def throw_if_cancelled() -> None:
    """Raise ComfyUI's interrupt if the user pressed Cancel. On the executor thread only: it takes the Cancel."""
    global _to_end
    import comfy.model_management

    if _to_end and prompt_id() == _to_end:
        comfy.model_management.interrupt_current_processing()
        _to_end = ""
    comfy.model_management.throw_exception_if_processing_interrupted()


def cancel(prompt_id: str) -> bool:
    """Have a prompt end as by Cancel; whether it runs. ComfyUI's own is not heard by a prompt that it just begins."""
    global _to_end
    import comfy.model_management
    from server import PromptServer

    queue = PromptServer.instance.prompt_queue
    with queue.mutex:  # it cannot end meanwhile, and leave the Cancel to the next one
        running = any(entry[1] == prompt_id for entry in queue.currently_running.values())
        if running and prompt_id != _ending:  # a second Cancel would break off its wait for the VRAM
            _to_end = prompt_id
            comfy.model_management.interrupt_current_processing()
    return running


def prompt_id() -> str:
    """Of the prompt that runs. Empty where no server does."""
    from server import PromptServer

    return getattr(getattr(PromptServer, "instance", None), "last_prompt_id", None) or ""


def take_cancel() -> None:
    """The prompt that runs is ending: it is not to hear again what ``cancel`` asked for."""
    global _to_end, _ending
    _to_end, _ending = "", prompt_id()


def ending() -> str:
    """The last prompt that ``take_cancel`` was told of."""
    return _ending


def end_prompt() -> BaseException:
    """The exception that ends the prompt as Cancel does (an ``Exception`` up to 0.19, a ``BaseException`` after)."""
    import comfy.model_management

    return comfy.model_management.InterruptProcessingException()


def ends_prompt(error: BaseException) -> bool:
    """Whether an exception is ComfyUI's interrupt."""
    import comfy.model_management

    return isinstance(error, comfy.model_management.InterruptProcessingException)


class Progress:
    """The progress bar on a node. On the executor thread only: its update may raise the user's Cancel."""

    INTERVAL = 0.2
    """Seconds between two updates."""

    def __init__(self, total: int, node_id: str | None) -> None:
        self._total, self._node_id, self._told = max(total, 1), node_id, 0.0

    def update(self, done: int, total: int | None = None, image: Any = None) -> None:
        """``image``: a PIL picture to show on the node."""
        import comfy.utils

        self._total = total or self._total
        if done < self._total and image is None and time.monotonic() < self._told + self.INTERVAL:
            return
        self._told = time.monotonic()
        # A bar for each update: newer ones tell only every half percent, which may be ten minutes of training.
        bar = comfy.utils.ProgressBar(self._total, node_id=self._node_id)
        bar.update_absolute(done, None, None if image is None else ("JPEG", image, None))


def tell(node_id: str | None, lines: Sequence[str]) -> None:
    """Show lines on a node while it works; what it has to say in the end takes their place."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is not None and node_id is not None:
        server.send_sync("flux_fft.said", {"node": node_id, "lines": list(lines)}, server.client_id)


def unload_models() -> None:
    """Have ComfyUI give back the VRAM of all its models. On the executor thread only."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


def let_go() -> None:
    """After the last reference to encoders is gone: have their memory back (T5 alone is 9 GB)."""
    import gc

    unload_models()
    gc.collect()


# -- encoders ------------------------------------------------------------------------------------------------------


def load_clip(clip_l: str, t5: str) -> Any:
    """ComfyUI's CLIP of a FLUX.1, from its two files."""
    import comfy.sd
    import folder_paths

    return comfy.sd.load_clip(ckpt_paths=[clip_l, t5], embedding_directory=folder_paths.get_folder_paths("embeddings"),
                              clip_type=comfy.sd.CLIPType.FLUX)


def load_vae(path: str) -> Any:
    """ComfyUI's VAE from its file."""
    import comfy.sd
    import comfy.utils

    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))
    vae.throw_exception_if_invalid()
    return vae


def encode_text(clip: Any, text: str, length: int) -> tuple[Tensor, Tensor]:
    """(context [length, D], pooled [P]) of one text, its T5 tokens padded or cut to ``length``.

    ComfyUI pads T5 to at least 256 tokens and never cuts, and would read ``(word:1.2)`` as a weight.
    """
    import torch

    tokens = clip.tokenize(escaped(text))
    dtype = torch.float32
    if "t5xxl" in tokens:
        tokens["t5xxl"] = [fixed_length(tokens["t5xxl"][0], length)]
        dtype = torch.bfloat16  # 4 MB on disk rather than 8; a large Flux rounds it to this anyway
    context, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
    return context[0].to("cpu", dtype), pooled[0].float().cpu()


def escaped(text: str) -> str:
    """``text`` with its brackets as ComfyUI's tokenizers take them for brackets, and not for weights."""
    return text.replace("(", "\\(").replace(")", "\\)")


def fixed_length(tokens: Sequence[tuple], length: int) -> list[tuple]:
    """T5 tokens padded with 0 to ``length``, or cut to it with the end token (1) kept last."""
    if len(tokens) > length:
        return [*tokens[: length - 1], (1, 1.0, *tokens[0][2:])]
    return [*tokens, *[(0, 1.0, *tokens[0][2:])] * (length - len(tokens))]


def encode_pixels(vae: Any, pixels: Tensor) -> Tensor:
    """Model-space latents [B, 16, H/8, W/8] of float32 pictures [B, H, W, 3] in 0..1."""
    import comfy.latent_formats

    return comfy.latent_formats.Flux().process_in(vae.encode(pixels).float().cpu())

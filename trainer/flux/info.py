"""What is known of a file: ``FileInfo``. Without torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

from .diffusers_names import Rows, rows_of

NOTHING = ("missing", "unreadable")
"""Kinds of what cannot be named: there is nothing at that path, or it cannot be read."""
USE = "use FLUX.1 dev, FLUX.1 Krea dev or FLUX.1 schnell as a bf16, f16 or f32 .safetensors file"
WHERE = ", such as flux1-dev.safetensors (23.8 GB) of black-forest-labs/FLUX.1-dev"


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What a file or folder is. What follows ``params`` is filled in only where ``trainable``."""

    path: str
    kind: str
    """``flux`` if it can be trained, else what it is: ``fill``, ``control``, ``kontext``, ``chroma``, ``flux2``,
    ``controlnet``, ``fp8``, ``nf4``, ``nunchaku``, ``quantized``, ``gguf``, ``pickle``, ``archive``, ``lora``,
    ``text_encoder``, ``vae``, ``lfs``, ``html``, ``text``, ``truncated``, ``downloading``, ``incomplete``, ``missing``,
    ``folder``, ``unreadable``, ``empty`` or ``other``."""
    trainable: bool = False
    reason: str = ""
    """Why it cannot be trained and what to use instead, in one line; empty if it can."""
    variant: str = ""
    """``dev`` (guidance-distilled: Krea too), ``schnell``, or ``de-distilled`` (a dev without guidance)."""
    dtype: str = ""
    """``bf16``, ``f16`` or ``f32``: that of most of its parameters (of another file: ``f8_e4m3``, ..., if it says)."""
    params: int = 0
    """Number of parameters of the Flux in it (of another file: of all numbers that it holds)."""
    prefix: str = ""
    """What stands before each of the Flux's names in the file."""
    norm_suffix: str = "scale"
    """Last part of the norms' names in the file: ``scale`` (Black Forest Labs) or ``weight`` (ComfyUI from 0.9 on)."""
    all_in_one: bool = False
    """Whether the file holds other models (text encoders, VAE) too."""
    flux: dict[str, Any] | None = None
    """The fields of ``model.FluxParams``."""
    diffusers: bool = False
    """Whether the tensors have diffusers' names."""
    note: str = ""
    """What was concluded from a hint, such as the file's name, and may be wrong; for the user."""
    parent_steps: int = 0
    """Updates that an export of this program says its weights have had (0: it is none)."""

    def rows(self, parameter: str, shape: tuple[int, ...]) -> tuple[Rows, ...]:
        """Where the rows of a parameter of ``model.Flux`` lie in the file: its tensors, in the parameter's order."""
        assert self.flux is not None, self.reason
        if self.diffusers:
            found = rows_of(parameter, shape, self.flux)
            return tuple(replace(each, name=self.prefix + each.name) for each in found)
        return (Rows(self.tensor_name(parameter), 0, shape[0]),)

    def tensor_name(self, parameter: str) -> str:
        """The file's name of a parameter of ``model.Flux``, under Black Forest Labs' names."""
        assert not self.diffusers
        if parameter.endswith("_norm.scale"):
            parameter = parameter[: -len("scale")] + self.norm_suffix
        return self.prefix + parameter


_PARTS = ("text_encoder", "vae")
_SELF_HELP = ("downloading", "empty", "lfs", "html", "text", "archive", "folder", "truncated")
"""Kinds whose description says what to do: the right file may be near."""


def one_line(text: str) -> str:
    """``text`` without line breaks and the like: the names within a file may hold anything."""
    return re.sub(r"[\x00-\x1f\x7f\x85\u2028\u2029]+", " ", text)


def refused(path: str | os.PathLike[str], kind: str, what: str, instead: str | None = None) -> FileInfo:
    """A file of another kind, or a Flux that cannot be trained: ``path what; instead``."""
    if instead is None:
        instead = "" if kind in _SELF_HELP else ("as flux, " if kind in _PARTS else "") + USE + WHERE
    return FileInfo(path=str(path), kind=kind, reason=f"{path} {what}" + (f"; {instead}" if instead else ""))

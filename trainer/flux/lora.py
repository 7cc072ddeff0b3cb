"""What a LoRA file changes, and where: its keys read against the parameters of ``model.Flux``. Without torch.

The same change is spelled in many ways: kohya (``lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight``), ComfyUI
(``diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight``), diffusers and peft
(``transformer.transformer_blocks.0.attn.to_q.lora_A.weight``: a part of a matrix of ours), OneTrainer
(``lora_transformer_...``), SimpleTuner (``lycoris_...``) and XLabs (``double_blocks.0.processor.qkv_lora1``). The
arithmetic is that of ComfyUI's ``comfy/weight_adapter`` and is done in ``intake.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..header import TensorInfo, read_header
from . import kinds
from .diffusers_names import rows_of
from .info import one_line
from .sizes import shapes_of

_DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class Change:
    """What one module of a LoRA adds to rows of a parameter."""

    kind: str
    """``lora`` (up x down), ``loha`` (the product of two such), ``lokr`` (Kronecker) or ``diff`` (as it is)."""
    tensors: Mapping[str, str]
    """The file's names of ``up``, ``down``, ``alpha``, ``w1``, ``w1_a``, ..., ``diff``, as far as there are."""
    parameter: str
    start: int
    """First row of the parameter that is changed."""
    rows: int
    first: int
    """Row of the change that goes there."""


@dataclass(frozen=True)
class Lora:
    """A LoRA file that fits a Flux."""

    path: str
    changes: tuple[Change, ...]
    ignored: int
    """Keys of text encoders, which are not trained and left as they are."""


_SUFFIXES: tuple[tuple[str, str], ...] = (
    (r"\.lora\.up\.weight|\.lora_up\.weight|\.lora_B(\.default)?(\.weight)?|\.lora_linear_layer\.up\.weight", "up"),
    (r"\.lora\.down\.weight|\.lora_down\.weight|\.lora_A(\.default)?(\.weight)?|\.lora_linear_layer\.down\.weight",
     "down"),
    (r"(?<=_lora)\.up\.weight|(?<=_lora[12])\.up\.weight", "up"),
    (r"(?<=_lora)\.down\.weight|(?<=_lora[12])\.down\.weight", "down"),
    (r"\.alpha", "alpha"),
    (r"\.diff|\.w_norm", "diff"),
    (r"\.diff_b|\.b_norm|\.lora_B(\.default)?\.bias", "bias"),
    (r"\.hada_(?P<hada>w[12]_[ab])", "hada"),
    (r"\.lokr_(?P<lokr>w[12](_[ab])?)", "lokr"),
)  # fmt: skip
_SUFFIX = re.compile("|".join(f"(?P<role{i}>{pattern})$" for i, (pattern, _) in enumerate(_SUFFIXES)))
_UNSUPPORTED = (
    (r"\.dora_scale$|\.lora_magnitude_vector", "a DoRA"),
    (r"\.oft_|\.boft", "an OFT"),
    (r"\.(a|b)[12]\.weight$", "a GLoRA"),
    (r"\.(lora_mid\.weight|hada_t[12]|lokr_t2)$", "a LyCORIS with a Tucker decomposition"),
    (
        r"\.(set_weight|reshape_weight)$|_norm\.scale$",
        "a LoRA that replaces weights, such as those of Canny and Depth,",
    ),
)
_TEXT = ("lora_te", "text_encoder", "lora_prior_te", "lycoris_te", "te1_", "te2_", "clip_l.", "t5xxl.", "bundle_emb")
_BEFORE = ("model.diffusion_model.", "diffusion_model.", "base_model.model.transformer.", "base_model.model.",
           "transformer.", "lora_unet_", "lora_transformer_", "lycoris_", "unet.", "")  # fmt: skip
_INSTEAD = "choose a LoRA that was made for FLUX.1"


def read_lora(path: str | os.PathLike[str], flux: dict[str, Any]) -> Lora:
    """What the LoRA at ``path`` changes of a Flux with the sizes ``flux``.

    Raises ``ValueError`` (one line, with the first key that is wrong) where it is no LoRA, is of a kind that is not
    read, or does not fit.
    """
    try:
        return _Reader(path, _table(path), flux).read()
    except ValueError as error:
        raise ValueError(one_line(str(error))) from None


def _table(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    try:
        refusal = kinds.by_name(Path(path)) or kinds.by_first_bytes(Path(path))
        if refusal:
            raise ValueError(f"lora {path} {refusal[1]}")
        return read_header(path).tensors
    except OSError as error:
        raise ValueError(f"lora {path} cannot be read ({error.strerror or error}): choose another file") from None


Places = tuple[tuple[str, int, int, int], ...]
"""Of a module: our module, its first row that is changed, how many, the row of the change that goes there."""


def _places(flux: dict[str, Any]) -> dict[str, Places]:
    """Where each module of a Flux lies among ours, by Black Forest Labs' and by diffusers' names."""
    found: dict[str, Places] = {}
    shared: dict[str, list[tuple[str, int, int, int]]] = defaultdict(list)
    for parameter, shape in shapes_of(flux).items():
        module, _, kind = parameter.rpartition(".")
        if kind == "bias":
            continue
        found[module] = ((module, 0, shape[0], 0),)
        at = 0
        for rows in rows_of(parameter, shape, flux):
            shared[rows.name.removesuffix(".weight")].append((module, at, rows.stop - rows.start, rows.start))
            at += rows.stop - rows.start
    found |= {name: tuple(places) for name, places in shared.items()}
    dim = flux["hidden_size"]
    for i in range(flux["depth"]):
        for stream, number in (("img", 1), ("txt", 2)):
            for layer in ("qkv", "proj"):
                name = f"double_blocks.{i}.processor.{layer}_lora{number}"
                found[name] = found[f"double_blocks.{i}.{stream}_attn.{layer}"]
        for half in ("ff", "ff_context"):  # LyCORIS
            for theirs, inner in (("linear_in", "net.0.proj"), ("linear_out", "net.2")):
                found[f"transformer_blocks.{i}.{half}.{theirs}"] = found[f"transformer_blocks.{i}.{half}.{inner}"]
    for i in range(flux["depth_single_blocks"]):
        found[f"single_blocks.{i}.processor.qkv_lora"] = ((f"single_blocks.{i}.linear1", 0, 3 * dim, 0),)
        found[f"single_blocks.{i}.processor.proj_lora"] = found[f"single_blocks.{i}.linear2"]
    return found


class _Reader:
    def __init__(self, path: str | os.PathLike[str], table: dict[str, TensorInfo], flux: dict[str, Any]) -> None:
        self.path, self.table, self.shapes = path, table, shapes_of(flux)
        places = _places(flux)
        self.places = places | {name.replace(".", "_"): value for name, value in places.items()}

    def read(self) -> Lora:
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        ignored = 0
        for key in self.table:
            if key.startswith(_TEXT):
                ignored += 1
                continue
            module, role = self._split(key)
            modules[module][role] = key
        changes = [change for module, tensors in modules.items() for change in self._changes(module, tensors)]
        if not changes:
            raise ValueError(f"lora {self.path} changes nothing in a Flux (it holds {ignored} tensors for text"
                             f" encoders): {_INSTEAD}")  # fmt: skip
        return Lora(str(self.path), tuple(changes), ignored)

    def _split(self, key: str) -> tuple[str, str]:
        """The module that a key belongs to, and what it is of it."""
        for pattern, called in _UNSUPPORTED:
            if re.search(pattern, key):
                raise ValueError(f"lora {self.path} is {called} which cannot be merged ({key}): {_INSTEAD}, of a plain"
                                 " kind")  # fmt: skip
        found = _SUFFIX.search(key)
        if not found:
            raise self._no_place(key)
        role = next(name for i, (_, name) in enumerate(_SUFFIXES) if found[f"role{i}"])
        return key[: found.start()], found[role] if role in ("hada", "lokr") else role

    def _no_place(self, key: str) -> ValueError:
        return ValueError(f"lora {self.path} does not fit: its key {key} belongs to no layer of this Flux; {_INSTEAD}")

    def _changes(self, module: str, tensors: dict[str, str]) -> list[Change]:
        first = next(iter(tensors.values()))
        bare = next((module[len(p) :] for p in _BEFORE if module.startswith(p) and module[len(p) :] in self.places), "")
        if not bare:
            raise self._no_place(first)
        for role, key in tensors.items():
            if self.table[key].dtype not in _DTYPES and role != "alpha":
                raise ValueError(f"lora {self.path}: {key} is {self.table[key].dtype}, which is not read; choose a LoRA"
                                 " in bf16, f16 or f32")  # fmt: skip
        places = self.places[bare]
        norm = f"{places[0][0]}.weight" not in self.shapes
        changes = []
        weights = {role: key for role, key in tensors.items() if role != "bias"}
        if set(weights) - {"alpha"}:
            kind, shape = self._shape_of_change(weights)
            suffix = "scale" if norm else "weight"
            changes += [Change(kind, weights, f"{m}.{suffix}", at, n, row) for m, at, n, row in places]
            self._check(changes, shape, first)
        if "bias" in tensors:
            more = [Change("diff", {"diff": tensors["bias"]}, f"{m}.bias", at, n, row) for m, at, n, row in places]
            if any(change.parameter not in self.shapes for change in more):
                raise self._no_place(tensors["bias"])
            self._check(more, self.table[tensors["bias"]].shape, tensors["bias"])
            changes += more
        return changes

    def _shape_of_change(self, tensors: Mapping[str, str]) -> tuple[str, tuple[int, ...]]:
        """The kind of a change, and the shape of what it adds. ``ValueError`` where tensors are missing or odd."""
        roles, shape = set(tensors) - {"alpha"}, {role: self._flat(key) for role, key in tensors.items()}
        if "diff" in roles and len(roles) == 1:
            return "diff", shape["diff"]
        if roles == {"up", "down"} and self._multiply(shape["up"], shape["down"]):
            return "lora", (shape["up"][0], shape["down"][1])
        if roles == {"w1_a", "w1_b", "w2_a", "w2_b"} and "hada_" in tensors["w1_a"]:
            if all(self._multiply(shape[f"{w}_a"], shape[f"{w}_b"]) for w in ("w1", "w2")):
                return "loha", (shape["w1_a"][0], shape["w1_b"][1])
        elif roles & {"w1", "w1_a"} and roles & {"w2", "w2_a"} and "up" not in roles:
            sides = []
            for w in ("w1", "w2"):
                a, b = f"{w}_a", f"{w}_b"
                if {a, b} <= roles and w not in roles and self._multiply(shape[a], shape[b]):
                    sides.append((shape[a][0], shape[b][1]))
                elif w in roles and not roles & {a, b} and len(shape[w]) == 2:
                    sides.append(shape[w])
            if len(sides) == 2:
                return "lokr", (sides[0][0] * sides[1][0], sides[0][1] * sides[1][1])
        first = next(iter(tensors.values()))
        raise ValueError(f"lora {self.path} is damaged: tensors beside {first} are missing, or do not fit each other;"
                         " download it again")  # fmt: skip

    def _flat(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor with all that follows its rows in one: 1 x 1 convolutions are matrices."""
        shape = self.table[key].shape
        return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else shape

    @staticmethod
    def _multiply(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
        return len(left) == len(right) == 2 and left[1] == right[0]

    def _check(self, changes: list[Change], shape: tuple[int, ...], key: str) -> None:
        for change in changes:
            whole = self.shapes[change.parameter]
            wanted = (sum(c.rows for c in changes), *whole[1:])
            if shape != wanted:
                raise ValueError(f"lora {self.path} does not fit: {key} changes {list(shape)} where this Flux has"
                                 f" {list(wanted)}; {_INSTEAD}, of its size")  # fmt: skip

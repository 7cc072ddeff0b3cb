"""A LoRA from what training has changed: the difference to the parent, one matrix at a time.

A matrix's change ``D`` [m, n] becomes ``up`` [m, r] and ``down`` [r, n], its best approximation of that rank: an exact
SVD where a side is short, else a randomised one with power iterations (Halko, Martinsson and Tropp 2011,
arXiv 0909.4061, algorithms 4.4 and 5.1). Where the factors would be no smaller than ``D``, ``D`` itself is written,
and so are the changes of biases and norms: at a high rank the LoRA is all of the training.

Names as ComfyUI reads them (``comfy.lora``, tried on 0.3.64 and 0.33.0): ``diffusion_model.X.lora_up.weight``,
``.lora_down.weight``, ``.alpha`` (the rank), ``.diff``, ``.diff_b``. The norms' own names differ between its versions;
diffusers' names for them (``transformer.transformer_blocks.0.attn.norm_q.diff``) do not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..flow import noise_like
from ..weights import DTYPES, Entry, TensorFile

log = logging.getLogger(__name__)

EXACT_BELOW = 512
"""Matrices with a shorter side than this are decomposed exactly."""
ITERATIONS = 4
"""Power iterations: what training changes has singular values that fall slowly."""
_NORMS = {
    "img_attn.norm.query_norm": "attn.norm_q", "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q", "txt_attn.norm.key_norm": "attn.norm_added_k",
    "norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k",
}  # fmt: skip

Parent = Callable[[str, int, int], Tensor]
"""(name, start, stop) -> these elements of the parent's tensor, flat."""
Progress = Callable[[int, int], None]


def low_rank(change: Tensor, rank: int, seed: str) -> tuple[Tensor, Tensor]:
    """``up`` [m, rank] and ``down`` [rank, n], whose product is next to ``change`` [m, n] among those of that rank.

    Both carry the roots of the singular values, so that neither is small. ``seed`` names the randomness.
    """
    m, n = change.shape
    if min(m, n) < EXACT_BELOW:
        left, values, right = torch.linalg.svd(change, full_matrices=False)
    else:
        width = min(rank + max(16, rank // 4), m, n)
        basis = _orthonormal(change @ noise_like((n, width), "lora", seed).to(change.device))
        for _ in range(ITERATIONS if width < min(m, n) else 0):
            basis = _orthonormal(change @ _orthonormal(change.T @ basis))
        inner, values, right = torch.linalg.svd(basis.T @ change, full_matrices=False)
        left = basis @ inner
    root = values[:rank].sqrt()
    return left[:, :rank] * root, root[:, None] * right[:rank]


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns)[0]


def lora_name(name: str) -> str:
    """The LoRA's name of a parameter's module: what stands before ``.lora_up.weight``, ``.diff`` or ``.diff_b``."""
    if name.endswith("_norm.scale"):
        stack, index, norm = name.removesuffix(".scale").split(".", 2)
        blocks = "transformer_blocks" if stack == "double_blocks" else "single_transformer_blocks"
        return f"transformer.{blocks}.{index}.{_NORMS[norm]}"
    return "diffusion_model." + name.removesuffix(".weight").removesuffix(".bias")


def is_factored(shape: Sequence[int], rank: int) -> bool:
    """Whether factors of ``rank`` are smaller than the matrix."""
    return len(shape) == 2 and rank * (shape[0] + shape[1]) < shape[0] * shape[1]


class Extraction:
    """The LoRA of ``entries`` (a Flux whose chunks are exact) against ``parent``, at most of ``rank``.

    ``entries()`` are to be written first, into a file of their own: ``measure`` reads that, and tells what it holds of
    the change. One matrix in float32 is held at a time, with its factors.
    """

    def __init__(self, entries: Sequence[Entry], parent: Parent, rank: int, dtype: str, device: str = "cpu") -> None:
        self._sources, self._parent, self._rank, self._dtype = entries, parent, rank, dtype
        self._device = torch.device(device)
        self._down: Tensor | None = None

    def entries(self) -> list[Entry]:
        """What to write; each asked for once, in this order."""
        made: list[Entry] = []
        for e in self._sources:
            name = lora_name(e.name)
            if is_factored(e.shape, self._rank):
                (m, n), r = e.shape, self._rank
                made += [
                    Entry(f"{name}.lora_up.weight", self._dtype, (m, r), lambda e=e: iter((self._factor(e),))),
                    Entry(f"{name}.lora_down.weight", self._dtype, (r, n), self._taken),
                    Entry(f"{name}.alpha", "F32", (), lambda: iter((torch.tensor(float(self._rank)),))),
                ]
            else:
                kind = "diff_b" if e.name.endswith(".bias") else "diff"
                made.append(Entry(f"{name}.{kind}", self._dtype, e.shape, lambda e=e: self._changes(e)))
        return made

    def measure(self, path: Path, progress: Progress | None = None) -> dict[str, float]:
        """How much of each tensor's change, as the share of its squares, the file at ``path`` keeps; all under "".

        ``ValueError`` where nothing has changed.
        """
        kept: dict[str, float] = {}
        whole = lost = 0.0
        done, total = 0, sum(e.nbytes for e in self._sources)
        with TensorFile(path) as file:
            for e in self._sources:
                before, after = self._lost(e, file)
                whole, lost = whole + before, lost + after
                if before and len(e.shape) == 2:
                    kept[e.name.removesuffix(".weight")] = 1 - after / before
                done += e.nbytes
                if progress is not None:
                    progress(done, total)
        if not whole:
            raise ValueError("the weights are those of the parent, so there is no LoRA of them: train the run first")
        return {"": 1 - lost / whole} | kept

    def _lost(self, e: Entry, file: TensorFile) -> tuple[float, float]:
        """Sum of squares of a tensor's change, and of what the file lacks of it."""
        name, whole, lost, start = lora_name(e.name), 0.0, 0.0, 0
        if not is_factored(e.shape, self._rank):
            kind = "diff_b" if e.name.endswith(".bias") else "diff"
            for change in self._changes(e):
                held = file.read(f"{name}.{kind}", start, start + change.numel()).float()
                whole, lost, start = whole + _squares(change), lost + _squares(change - held), start + change.numel()
            return whole, lost
        change = self._change(e)
        up, down = (file.load(f"{name}.lora_{k}.weight", torch.float32).to(change.device) for k in ("up", "down"))
        for rows, factors in zip(change.split(1024), up.split(1024), strict=True):
            whole, lost = whole + _squares(rows), lost + _squares(rows - factors @ down)
        return whole, lost

    def _changes(self, e: Entry) -> Iterator[Tensor]:
        start = 0
        for chunk in e.chunks():
            chunk = chunk.float().flatten()
            yield chunk - self._parent(e.name, start, start + chunk.numel()).float()
            start += chunk.numel()

    def _change(self, e: Entry) -> Tensor:
        """The change of a matrix, float32 [m, n], where it is worked on."""
        flat = torch.empty(e.shape, device=self._device)
        start = 0
        for change in self._changes(e):
            flat.view(-1)[start : start + change.numel()].copy_(change)
            start += change.numel()
        return flat

    def _factor(self, e: Entry) -> Tensor:
        """``up`` of a matrix; ``down`` is kept for the next entry."""
        try:
            up, down = low_rank(self._change(e), self._rank, e.name)
        except torch.cuda.OutOfMemoryError:
            log.warning("the GPU's memory is too small for the LoRA of %s: it is made on the CPU", e.name)
            self._device = torch.device("cpu")
            up, down = low_rank(self._change(e), self._rank, e.name)
        self._down = down.to("cpu", DTYPES[self._dtype])
        return up.to("cpu", DTYPES[self._dtype])

    def _taken(self) -> Iterator[Tensor]:
        assert self._down is not None
        down, self._down = self._down, None
        yield down


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64) ** 2)


def told(kept: dict[str, float]) -> str:
    """What a LoRA keeps, in words."""
    if len(kept) == 1:
        return "keeps all of the change"
    worst = min((name for name in kept if name), key=lambda name: kept[name])
    return f"keeps {kept['']:.1%} of the change; least, {kept[worst]:.1%}, of {worst}"


def as_metadata(kept: dict[str, float]) -> dict[str, str]:
    """The same for the file."""
    each = {name: round(share, 4) for name, share in kept.items() if name}
    return {"flux_fft.kept": f"{kept['']:.6f}", "flux_fft.kept_by_matrix": json.dumps(each, separators=(",", ":"))}

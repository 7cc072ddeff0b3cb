"""Files for others to load: a checkpoint, an all-in-one checkpoint or a LoRA, of weights in memory or on disk.

Everything is streamed, written beside its name, read back and compared, and only then given its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..header import put_hash
from ..progress import size
from ..settings import one_of, require, whole
from .describe import TEXTS, describe, parent_of
from .model_note import fingerprint_of, noted_fingerprint

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..flux.variants import FileInfo
    from ..loop import Trainer
    from ..run import RunDirectory
    from ..weights import Entry
    from .extract import Parent

log = logging.getLogger(__name__)

DTYPES = ("bf16", "f16", "f32", "fp8")
LARGEST_RANK = 4096
Progress = Callable[[str, int, int], None]
"""(what is done: extracting, measuring, writing or checking; bytes done; bytes of it all). May raise, to end it."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written of a run, and how."""

    dtype: str = "bf16"
    """``bf16``, ``f16``, ``f32`` or ``fp8`` (scaled, as ComfyUI loads it)."""
    lora_rank: int = 0
    """A LoRA of this rank against the parent instead of the whole model; 0: the model."""
    ema: bool = False
    """The average of the weights instead of the weights."""
    from_step: int = 0
    """The save point or checkpoint of this step; 0: the weights as they are."""
    all_in_one: bool = False
    """With the text encoders and the VAE of the run's model, for Load Checkpoint."""
    include: tuple[str, ...] = ()
    """What the metadata tells besides, of ``describe.TEXTS``."""
    overwrite: bool = False
    """Whether a file of that name may be replaced."""
    metadata: dict = dataclasses.field(default_factory=dict)
    """Added to the file's metadata, or put in the place of what it says."""

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        whole("lora_rank", self.lora_rank, 0, LARGEST_RANK)
        whole("from_step", self.from_step, 0)
        object.__setattr__(self, "include", tuple(self.include))
        for what in self.include:
            one_of("include", what, TEXTS)
        require(not (self.lora_rank and self.dtype == "fp8"), "dtype is 'fp8': a LoRA is written as bf16, f16 or f32")
        require(not (self.lora_rank and self.all_in_one),
                f"lora_rank is {self.lora_rank}: a LoRA has no text encoders and no VAE, turn all_in_one off")


@dataclass(frozen=True)
class _Weights:
    """What is exported: exact entries under the parameters' own names, and what they are of."""

    entries: Callable[[], list[Entry]]
    step: int
    config: RunConfig
    info: FileInfo
    device: str


def check_target(path: Path, overwrite: bool) -> None:
    """Raise ``ValueError`` unless a checkpoint may be written to ``path``."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file in it, such as {path / 'model.safetensors'}")
    if path.suffix.lower() != ".safetensors":
        raise ValueError(f"{path} does not end in .safetensors: only such files are found as models")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: choose another name, or allow it with overwrite")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist: create it or choose another")


def export(run: RunDirectory, path: str | os.PathLike[str], options: ExportOptions = ExportOptions(), *,
           trainer: Trainer | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Write a file of the run: of the weights of ``trainer``, or of what the disk holds (the run's lock is held).

    Returns ``path``, ``bytes``, ``step``, ``dtype`` and ``text``, a line for the user. ``ValueError`` in one line where
    the file exists, the disk is too small or an option does not fit; nothing is left then.
    """
    target = Path(os.path.abspath(path))
    check_target(target, options.overwrite)
    weights = _live(trainer, options) if trainer is not None and not options.from_step else _saved(run, options)
    report = progress or (lambda *_: None)
    about = describe(run, weights.config, step=weights.step, variant=weights.info.variant, dtype=options.dtype,
                     lora_rank=options.lora_rank, ema=options.ema, include=options.include)  # fmt: skip
    told = ""
    if options.lora_rank:
        told = ", " + _write_lora(run, target, weights, options, about, report)
    else:
        _write(target, _model(weights, options), about | options.metadata, options, report)
    kind = f"LoRA of rank {options.lora_rank}, " if options.lora_rank else "all in one, " if options.all_in_one else ""
    written = target.stat().st_size
    text = f"{kind}{options.dtype}, {'average at ' if options.ema else ''}step {weights.step}, {size(written)}{told}"
    return {"path": str(target), "bytes": written, "step": weights.step, "dtype": options.dtype, "text": text}


# -- from where ----------------------------------------------------------------------------------------------------


def _live(trainer: Trainer, options: ExportOptions) -> _Weights:
    if options.lora_rank and trainer.device.type != "cpu":
        trainer.park()  # the matrices are decomposed on the GPU
    entries = functools.partial(trainer.entries, "f32", ema=options.ema)
    return _Weights(entries, trainer.step, trainer.config, trainer.info, str(trainer.device))


def _saved(run: RunDirectory, options: ExportOptions) -> _Weights:
    """A save point or, where there is none of that step, a weights-only checkpoint."""
    from ..saves.masters import saved_entries
    from ..saves.saved import kept_at

    source = kept_at(run, options.from_step) if options.from_step else run.latest_save_point()
    if source is None:
        raise ValueError(f"run {run.name!r} has no save point: train it first")
    entries = functools.partial(saved_entries, source.path, "f32", ema=options.ema)
    if source.path.is_file():
        require(not options.ema, f"ema: the checkpoint of step {source.step} has no average, only save points have")
        entries = functools.partial(_checkpoint, source.path)
    return _Weights(entries, source.step, run.config, run.flux(resumed=True), _device())


def _checkpoint(path: Path) -> list[Entry]:
    from .reread import copies

    return [dataclasses.replace(e, dtype="F32") for e in copies(path)]


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# -- what ----------------------------------------------------------------------------------------------------------


def _model(weights: _Weights, options: ExportOptions) -> list[Entry]:
    from ..saves.masters import DTYPES as PLAIN
    from ..weights import dtype_name
    from .bundle import MODEL, companions
    from .fp8 import scaled_entries

    entries = weights.entries()
    if options.dtype == "fp8":
        entries = scaled_entries(entries)
    else:
        entries = [dataclasses.replace(e, dtype=dtype_name(PLAIN[options.dtype])) for e in entries]
    if options.all_in_one:
        entries = [dataclasses.replace(e, name=MODEL + e.name) for e in entries]
        entries += companions(weights.config.model)
    return entries


def _write(target: Path, entries: Sequence[Entry], about: Mapping[str, str], options: ExportOptions,
           report: Progress) -> None:
    from ..weights import write_safetensors
    from .reread import compare

    def inspect(part: Path) -> None:
        digest = compare(part, entries, about, lambda done, total: report("checking", done, total))
        put_hash(part, digest)
        check_target(target, options.overwrite)  # one may have come meanwhile

    write_safetensors(target, entries, about, progress=lambda done, total: report("writing", done, total),
                      inspect=inspect)  # fmt: skip


def _write_lora(run: RunDirectory, target: Path, weights: _Weights, options: ExportOptions, about: dict[str, str],
                report: Progress) -> str:
    """Write the LoRA by way of a file of its factors, so that what they keep is known for the header."""
    from ..saves.masters import DTYPES as PLAIN
    from ..weights import check_space, dtype_name, write_safetensors
    from .extract import Extraction, as_metadata, told
    from .reread import copies

    factors = target.with_name(f"{files.PART}{target.name}-{secrets.token_hex(4)}")
    dtype = dtype_name(PLAIN[options.dtype])
    with _parent(run, weights) as parent:
        made = Extraction(weights.entries(), parent, options.lora_rank, dtype, weights.device)
        check_space(target, 2 * sum(e.nbytes for e in made.entries()))
        try:
            write_safetensors(factors, made.entries(), progress=lambda done, total: report("extracting", done, total))
            kept = made.measure(factors, lambda done, total: report("measuring", done, total))
            _write(target, copies(factors), about | as_metadata(kept) | options.metadata, options, report)
        finally:
            files.unlink(factors)
    return told(kept)


@contextlib.contextmanager
def _parent(run: RunDirectory, weights: _Weights) -> Iterator[Parent]:
    """The model's file as a parent to compare with. ``ValueError`` if it is gone or another."""
    from ..flux.intake import open_source
    from ..flux.variants import require_flux

    path = parent_of(weights.config.model)
    require(os.path.exists(path), f"lora_rank: {path} is gone; put it back, a LoRA is the difference to it")
    info = require_flux(path)
    same = noted_fingerprint(run.path / "model.json", path) in ("unknown", fingerprint_of(path))
    require(same and info.flux == weights.info.flux,
            f"{path} is another Flux than the one that this run began with: put that file back, a LoRA is for it")
    with open_source(path, info) as source:
        yield source.read

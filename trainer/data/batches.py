"""The samples of a run, read from the cache: their latents, captions and masks.

Nothing here imports torch until tensors are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .counted import chance
from .manifest import cache_root, check_manifest
from .order import Order, Shape
from .store import Cache

if TYPE_CHECKING:
    import torch

_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True)
class Examples:
    """Samples as the loss needs them, on the CPU. B samples of one shape."""

    latents: torch.Tensor
    """Float32 [B, 16, h, w], in the model's space."""
    context: torch.Tensor
    """[B, T, D]."""
    pooled: torch.Tensor
    """[B, P]."""
    weight: torch.Tensor | None
    """Factor of the loss at each latent pixel, float32 [B, 1, h, w]; None where all are 1."""


class Dataset:
    """The cached samples of a manifest (``dataset.json``), as the training loop reads them."""

    validation: Dataset | None = None
    """The samples that are measured and never trained; None: there are none."""
    _order: tuple[tuple[int, int], Order] | None = None

    def __init__(self, manifest: Mapping[str, Any], run_dir: str | Path) -> None:
        """``run_dir`` is what the manifest's relative cache path starts from.

        Raises ``ValueError`` if the manifest or its cache folder cannot be used.
        """
        check_manifest(manifest)
        self._samples = manifest["samples"]
        self._empty = manifest["empty_caption"]
        self._cache = Cache(cache_root(manifest, run_dir))
        self._memory: OrderedDict[tuple[str, str], tuple[torch.Tensor, ...]] = OrderedDict()
        self._held = 0
        self.fingerprint: str = manifest["fingerprint"]
        self.shapes: list[Shape] = [(int(s["shape"][0]), int(s["shape"][1])) for s in self._samples]
        """One entry for each picture and resolution."""
        self.repeats: list[int] | None = [int(s.get("repeats", 1)) for s in self._samples]
        """How often each is seen in an epoch; None: once."""
        if max(self.repeats) == 1:
            self.repeats = None
        if manifest.get("validation"):
            self.validation = Dataset({**manifest, "samples": manifest["validation"], "validation": []}, run_dir)

    def __len__(self) -> int:
        return len(self._samples)

    def names(self, indices: Sequence[int]) -> list[str]:
        """The pictures' paths relative to the dataset folder."""
        return [self._samples[i]["image"] for i in indices]

    def order(self, batch_size: int, seed: int) -> Order:
        """In which order the samples are trained; the newest one asked for is kept."""
        if self._order is None or self._order[0] != (batch_size, seed):
            self._order = (batch_size, seed), Order(self.shapes, batch_size, seed, self.repeats)
        return self._order[1]

    def examples(
        self, indices: Sequence[int], counters: Sequence[Sequence[int | str]], dropout: float, *, train: bool
    ) -> Examples:
        """Samples of one shape with the choices that ``counters`` make: mirrored or not, which caption, or none.

        ``dropout``: share of the samples with the empty caption. Without ``train`` nothing is chosen: upright, the
        first caption. Raises ``ValueError`` as ``latents`` does.
        """
        from ..flow import is_dropped

        flipped = [train and chance("flip", *c) < 0.5 for c in counters]
        dropped = [train and is_dropped(dropout, *c) for c in counters]
        chosen = [chance("caption", *c) if train else 0.0 for c in counters]
        context, pooled = self.captions(indices, dropped, chosen)
        return Examples(self.latents(indices, flipped).float(), context, pooled, self.weights(indices, flipped))

    def latents(self, indices: Sequence[int], flipped: Sequence[bool] | None = None) -> torch.Tensor:
        """Model-space latents [B, 16, h, w] on the CPU; all of one shape. ``flipped``: mirrored, where the set is.

        Raises ``ValueError`` naming the picture if an entry is missing or damaged (it is then deleted, so that
        preparing the dataset again makes it anew).
        """
        import torch

        keys = [self._samples[i].get("flipped" if flip else "latent") or self._samples[i]["latent"]
                for i, flip in zip(indices, flipped or [False] * len(indices), strict=True)]  # fmt: skip
        return torch.stack([self._read("latents", key, i)[0] for key, i in zip(keys, indices, strict=True)])

    def captions(
        self, indices: Sequence[int], dropped: Sequence[bool], chosen: Sequence[float] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded captions: context [B, T, D] and pooled [B, P]; the empty caption where ``dropped`` is true.

        ``chosen``: which of several captions, as a place in [0, 1) among them; None: the first.
        """
        import torch

        pairs = []
        for i, drop, place in zip(indices, dropped, chosen or [0.0] * len(indices), strict=True):
            keys = self._samples[i].get("captions") or [self._samples[i]["caption"]]
            pairs.append(self._read("captions", self._empty if drop else keys[int(place * len(keys))], i))
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def weights(self, indices: Sequence[int], flipped: Sequence[bool]) -> torch.Tensor | None:
        """Factors of the loss [B, 1, h, w]: those of the masks times those of the sets. None where all are 1."""
        import torch

        records = [self._samples[i] for i in indices]
        if not any("mask" in r or "weight" in r for r in records):
            return None
        found = []
        for i, record, flip in zip(indices, records, flipped, strict=True):
            weight = torch.ones(self.shapes[i])
            if "mask" in record:
                outside, mask = record.get("outside_mask", 0.0), self._read("masks", record["mask"], i)[0].float()
                weight = outside + (1 - outside) * (mask.flip(-1) if flip and "flipped" in record else mask)
            found.append(weight[None] * record.get("weight", 1.0))
        weights = torch.stack(found)
        return None if bool((weights == 1).all()) else weights

    def empty_caption(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoded empty caption: context [1, T, D] and pooled [1, P]."""
        context, pooled = self._read("captions", self._empty, 0)
        return context[None], pooled[None]

    def _read(self, kind: str, key: str, index: int) -> tuple[torch.Tensor, ...]:
        held = self._memory.get((kind, key))
        if held is not None:
            self._memory.move_to_end((kind, key))
            return held
        tensors = self._cache.read(kind, key)
        if tensors is None:
            name = self._samples[index]["image"]
            raise ValueError(
                f"cached {kind} of {name} are missing or damaged in {self._cache.root}: prepare the dataset again"
                " (queue Start, or repeat the command) and they are made anew"
            )
        self._memory[(kind, key)] = tensors
        self._held += _size(tensors)
        while self._held > _MEMORY_BYTES and len(self._memory) > 1:
            self._held -= _size(self._memory.popitem(last=False)[1])
        return tensors


def _size(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)

"""Which samples a step trains on, and their cached latents and captions.

The order is a pure function of (shapes, batch size, seed, step): a run that resumes at any step continues the
same order. Nothing here imports torch until tensors are asked for.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import Cache
from .manifest import cache_root, check_manifest

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]
"""Height and width of a latent, in latent pixels (8 image pixels each)."""

_MEMORY_BYTES = 256 << 20
_MASK = (1 << 64) - 1


def batch_indices(shapes: Sequence[Shape], batch_size: int, seed: int, step: int) -> list[int]:
    """Indices of the samples of update ``step`` (counted from 1).

    Every batch holds samples of one shape; each sample comes exactly once an epoch, whatever its shape; the order of
    the batches and their contents are shuffled anew by (seed, epoch). A shape whose count is no multiple of the batch
    size is shared out evenly (16 samples at batch 5: four batches of 4, not 5, 5, 5 and a lone one that would weigh
    five times as much).
    """
    assert step >= 1 and batch_size >= 1
    if not shapes:
        raise ValueError("the dataset has no samples: give a folder with at least one usable picture")
    frozen = tuple((h, w) for h, w in shapes)
    epoch, place = divmod(step - 1, batches_per_epoch(frozen, batch_size))
    return list(_epoch(frozen, batch_size, seed & _MASK, epoch)[place])


@functools.lru_cache(maxsize=8)
def _count(shapes: tuple[Shape, ...], batch_size: int) -> int:
    counts: dict[Shape, int] = {}
    for shape in shapes:
        counts[shape] = counts.get(shape, 0) + 1
    return sum(-(-n // batch_size) for n in counts.values())


def batches_per_epoch(shapes: Sequence[Shape], batch_size: int) -> int:
    """How many updates see every sample once."""
    return _count(tuple((h, w) for h, w in shapes), batch_size)


@functools.lru_cache(maxsize=2)
def _epoch(shapes: tuple[Shape, ...], batch_size: int, seed: int, epoch: int) -> tuple[tuple[int, ...], ...]:
    # Sorting by a hash, not random.shuffle: the order must be the same under every Python and numpy version.
    by_shape: dict[Shape, list[int]] = {}
    stream = mix(seed, 2 * epoch)
    for index in sorted(range(len(shapes)), key=lambda i: mix(stream, i)):
        by_shape.setdefault(shapes[index], []).append(index)
    batches = []
    for shape in sorted(by_shape):
        members = by_shape[shape]
        parts = -(-len(members) // batch_size)
        cuts = [len(members) * i // parts for i in range(parts + 1)]
        batches += [tuple(members[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    stream = mix(seed, 2 * epoch + 1)
    return tuple(batches[i] for i in sorted(range(len(batches)), key=lambda i: mix(stream, i)))


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two integers (the finaliser of splitmix64 over their combination)."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & _MASK
    for _ in range(2):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return x


class Dataset:
    """The cached samples of a manifest (``dataset.json``), as the training loop reads them."""

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

    def __len__(self) -> int:
        return len(self._samples)

    def names(self, indices: Sequence[int]) -> list[str]:
        """The pictures' paths relative to the dataset folder."""
        return [self._samples[i]["image"] for i in indices]

    def latents(self, indices: Sequence[int]) -> torch.Tensor:
        """Model-space latents [B, 16, h, w] on the CPU; all of one shape.

        Raises ``ValueError`` naming the picture if an entry is missing or damaged (it is then deleted, so that
        preparing the dataset again makes it anew).
        """
        import torch

        return torch.stack([self._read("latents", self._samples[i]["latent"], i)[0] for i in indices])

    def captions(self, indices: Sequence[int], dropped: Sequence[bool]) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded captions: context [B, T, D] and pooled [B, P]; the empty caption where ``dropped`` is true."""
        import torch

        assert len(indices) == len(dropped)
        pairs = [
            self._read("captions", self._empty if drop else self._samples[i]["caption"], i)
            for i, drop in zip(indices, dropped, strict=True)
        ]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

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

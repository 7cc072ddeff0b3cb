"""Which samples a step trains on, and their cached latents, captions and masks.

The order is a pure function of (shapes, repeats, batch size, seed, step): a run that resumes at any step continues the
same order. Nothing here imports torch until tensors are asked for.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .counted import WHOLE, chance, mix
from .manifest import cache_root, check_manifest
from .store import Cache

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]
"""Height and width of a latent, in latent pixels (8 image pixels each)."""

_MEMORY_BYTES = 256 << 20
MOST_AN_EPOCH = 5_000_000
"""Pictures times repeats that one epoch may have: its order is held in memory."""


def batch_indices(
    shapes: Sequence[Shape], batch_size: int, seed: int, step: int, repeats: Sequence[int] | None = None
) -> list[int]:
    """Indices of the samples of update ``step`` (counted from 1).

    Every batch holds samples of one shape; each sample comes exactly once an epoch, or ``repeats`` times, whatever its
    shape; the order of the batches and their contents are shuffled anew by (seed, epoch). A shape whose count is no
    multiple of the batch size is shared out evenly (16 samples at batch 5: four batches of 4, not 5, 5, 5 and a lone
    one that would weigh five times as much). A sample's repeats are spread over the epoch.
    """
    assert step >= 1 and batch_size >= 1
    if not shapes:
        raise ValueError("the dataset has no samples: give a folder with at least one usable picture")
    frozen, times = tuple((h, w) for h, w in shapes), _times(shapes, repeats)
    epoch, place = divmod(step - 1, _count(frozen, batch_size, times))
    return list(_epoch(frozen, batch_size, seed & WHOLE, epoch, times)[place])


def batch_number(step: int, skipped: Sequence[int] = ()) -> int:
    """Number of the batch of update ``step``: the step-th whole number from 1 that is not in ``skipped`` (rising).

    So a batch that is left out costs no other one and repeats none, before or after it.
    """
    number = step
    for left_out in skipped:
        if left_out > number:
            break
        number += 1
    return number


def batches_per_epoch(shapes: Sequence[Shape], batch_size: int, repeats: Sequence[int] | None = None) -> int:
    """How many updates see every sample once, or ``repeats`` times."""
    return _count(tuple((h, w) for h, w in shapes), batch_size, _times(shapes, repeats))


def counters_of(seed: int, rollbacks: int, step: int, samples: Sequence[int]) -> list[tuple[int, ...]]:
    """What the randomness of each sample of a batch is counted by.

    A sample that is in the batch more than once has one number more from the second time on: other noise.
    """
    seen: dict[int, int] = {}
    found: list[tuple[int, ...]] = []
    for i in samples:
        again = seen.get(i, 0)
        found.append((seed, rollbacks, step, i, again) if again else (seed, rollbacks, step, i))
        seen[i] = again + 1
    return found


def _times(shapes: Sequence[Shape], repeats: Sequence[int] | None) -> tuple[int, ...] | None:
    if repeats is None or all(n == 1 for n in repeats):
        return None
    assert len(repeats) == len(shapes) and min(repeats) >= 1
    if sum(repeats) > MOST_AN_EPOCH:
        raise ValueError(f"repeats make {sum(repeats)} pictures an epoch, more than {MOST_AN_EPOCH}: lower repeats")
    return tuple(repeats)


@functools.lru_cache(maxsize=8)
def _count(shapes: tuple[Shape, ...], batch_size: int, times: tuple[int, ...] | None) -> int:
    counts: dict[Shape, int] = {}
    for i, shape in enumerate(shapes):
        counts[shape] = counts.get(shape, 0) + (times[i] if times else 1)
    return sum(-(-n // batch_size) for n in counts.values())


@functools.lru_cache(maxsize=2)
def _epoch(
    shapes: tuple[Shape, ...], batch_size: int, seed: int, epoch: int, times: tuple[int, ...] | None
) -> tuple[tuple[int, ...], ...]:
    # Sorting by a hash, not random.shuffle: the order must be the same under every Python and numpy version.
    by_shape: dict[Shape, list[int]] = {}
    stream = mix(seed, 2 * epoch)
    for index in _shuffled(len(shapes), stream, times):
        by_shape.setdefault(shapes[index], []).append(index)
    batches = []
    for shape in sorted(by_shape):
        members = by_shape[shape]
        parts = -(-len(members) // batch_size)
        cuts = [len(members) * i // parts for i in range(parts + 1)]
        batches += [tuple(members[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    stream = mix(seed, 2 * epoch + 1)
    return tuple(batches[i] for i in sorted(range(len(batches)), key=lambda i: mix(stream, i)))


def _shuffled(count: int, stream: int, times: tuple[int, ...] | None) -> list[int]:
    if times is None:
        return sorted(range(count), key=lambda i: mix(stream, i))
    # The k-th of n repeats falls into the k-th of n equal parts of the epoch, so that they seldom share a batch.
    places = [(((k << 64) + mix(mix(stream, i), k)) // n, i) for i, n in enumerate(times) for k in range(n)]
    return [i for _, i in sorted(places)]


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

"""Which samples a step trains on: a pure function of (shapes, repeats, batch size, seed, step).

A run that resumes at any step continues the same order. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .counted import WHOLE, mix, mix_all

Shape = tuple[int, int]
"""Height and width of a latent, in latent pixels (8 image pixels each)."""
MOST_AN_EPOCH = 5_000_000
"""Pictures times repeats that one epoch may have: its order is held in memory."""


class Order:
    """The order of a dataset's samples; of one epoch at a time it is held in memory, 4 bytes a sample.

    Every batch holds samples of one shape; each sample comes exactly once an epoch, or ``repeats`` times, whatever its
    shape; the order of the batches and their contents are shuffled anew by (seed, epoch). A shape whose count is no
    multiple of the batch size is shared out evenly (16 samples at batch 5: four batches of 4, not 5, 5, 5 and a lone
    one that would weigh five times as much). A sample's repeats are spread over the epoch.

    Raises ``ValueError`` where there are no samples, or too many.
    """

    def __init__(self, shapes: Sequence[Shape], batch_size: int, seed: int,
                 repeats: Sequence[int] | None = None) -> None:  # fmt: skip
        assert batch_size >= 1
        if not shapes:
            raise ValueError("the dataset has no samples: give a folder with at least one usable picture")
        numbers = {shape: i for i, shape in enumerate(sorted({(h, w) for h, w in shapes}))}
        self._shapes = np.array([numbers[h, w] for h, w in shapes], dtype=np.int32)
        self._times = _times(shapes, repeats)
        self._seed = seed & WHOLE
        counts = np.bincount(self._shapes, self._times).astype(np.int64).tolist()
        starts, first = [], 0
        for count in counts:
            parts = -(-count // batch_size)
            starts += [first + count * i // parts for i in range(parts)]
            first += count
        self._starts = np.array([*starts, first], dtype=np.int64)
        """Where each batch begins in an epoch's samples, which lie shape by shape."""
        self._epoch = -1
        self._members = self._batches = np.empty(0, dtype=np.int32)

    @property
    def per_epoch(self) -> int:
        """How many batches see every sample once, or ``repeats`` times."""
        return len(self._starts) - 1

    @property
    def samples(self) -> int:
        """Samples of an epoch, each counted as often as it is seen."""
        return int(self._starts[-1])

    def batch(self, number: int) -> list[int]:
        """Indices of the samples of batch ``number``, counted from 1."""
        assert number >= 1
        epoch, place = divmod(number - 1, self.per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        batch = self._batches[place]
        return self._members[self._starts[batch] : self._starts[batch + 1]].tolist()

    def _shuffle(self, epoch: int) -> None:
        # Sorting by a hash, not random.shuffle: the order must be the same under every Python and numpy version.
        shuffled = _shuffled(len(self._shapes), mix(self._seed, 2 * epoch), self._times)
        self._members = shuffled[np.argsort(self._shapes[shuffled], kind="stable")]
        self._batches = _shuffled(self.per_epoch, mix(self._seed, 2 * epoch + 1), None)
        self._epoch = epoch


def batches_per_epoch(shapes: Sequence[Shape], batch_size: int, repeats: Sequence[int] | None = None) -> int:
    """How many updates see every sample once, or ``repeats`` times."""
    return Order(shapes, batch_size, 0, repeats).per_epoch


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


def _times(shapes: Sequence[Shape], repeats: Sequence[int] | None) -> np.ndarray | None:
    if repeats is None or all(n == 1 for n in repeats):
        return None
    assert len(repeats) == len(shapes) and min(repeats) >= 1
    if sum(repeats) > MOST_AN_EPOCH:
        raise ValueError(f"repeats make {sum(repeats)} pictures an epoch, more than {MOST_AN_EPOCH}: lower repeats")
    return np.array(repeats, dtype=np.uint64)


def _shuffled(count: int, stream: int, times: np.ndarray | None) -> np.ndarray:
    """The numbers below ``count``, each as often as ``times`` says, in the order of their hashes. int32."""
    numbers = np.arange(count, dtype=np.uint64)
    places = mix_all(stream, numbers)
    if times is not None:
        n = times.astype(np.int64)
        numbers, of = np.repeat(numbers, n), np.repeat(times, n)
        nth = np.arange(len(numbers), dtype=np.uint64) - np.repeat(np.cumsum(times) - times, n)
        hashes = mix_all(np.repeat(places, n), nth)
        # The k-th of n repeats falls into the k-th of n equal parts of the epoch, so that they seldom share a batch:
        # (k * 2**64 + hash) // n, in whole numbers of 64 bits.
        part, rest = WHOLE // of, WHOLE % of + np.uint64(1)
        places = nth * part + hashes // of + (nth * rest + hashes % of) // of
    return numbers[np.argsort(places, kind="stable")].astype(np.int32)

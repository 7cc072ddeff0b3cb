"""From a folder of pictures to batches: scan, encode into the cache, and read back in a fixed order."""

from .batches import Dataset, batch_indices, batches_per_epoch
from .cache import Cache

__all__ = ["Cache", "Dataset", "batch_indices", "batches_per_epoch"]

"""From a folder of pictures to batches: scan, encode into the cache, and read back in a fixed order."""

from .batches import Dataset
from .cache import Cache, prepare
from .captions import caption_for
from .images import load_image
from .order import batches_per_epoch
from .report import Sample, ScanReport
from .scan import scan_folder

__all__ = [
    "Cache",
    "Dataset",
    "Sample",
    "ScanReport",
    "batches_per_epoch",
    "caption_for",
    "load_image",
    "prepare",
    "scan_folder",
]

"""Optimizers whose states are packed, exact in their weights, and bit-exact when resumed."""

from .adam import AdamRule
from .adan import AdanRule
from .base import (
    BLOCK,
    CHUNK,
    GRAD_LIMIT,
    SMALL,
    STATE_FORMATS,
    WEIGHT_PRECISIONS,
    UpdateSpec,
    count_kept,
    finite,
    formats_for,
    load_master_,
    make_storage,
    mask_rescale,
    master,
    slice_storage,
    spec_from_config,
    storage_layout,
    update_chunk_,
)
from .fused import FusedBackward, fuse_backward
from .optimizers import AdamOffload, AdamWOffload, AdanOffload, NAdamOffload, NAdamWOffload

__all__ = [
    "BLOCK",
    "CHUNK",
    "GRAD_LIMIT",
    "SMALL",
    "STATE_FORMATS",
    "WEIGHT_PRECISIONS",
    "AdamOffload",
    "AdamRule",
    "AdamWOffload",
    "AdanOffload",
    "AdanRule",
    "FusedBackward",
    "NAdamOffload",
    "NAdamWOffload",
    "UpdateSpec",
    "count_kept",
    "finite",
    "formats_for",
    "fuse_backward",
    "load_master_",
    "make_storage",
    "mask_rescale",
    "master",
    "slice_storage",
    "spec_from_config",
    "storage_layout",
    "update_chunk_",
]

"""Optimizers whose states are packed, exact in their weights, and bit-exact when resumed."""

from .adam import AdamRule
from .adan import AdanRule
from .base import (
    BLOCK,
    CHUNK,
    GRAD_LIMIT,
    STATE_FORMATS,
    WEIGHT_PRECISIONS,
    UpdateSpec,
    finite,
    formats_for,
    load_master_,
    make_storage,
    master,
    slice_storage,
    spec_from_config,
    storage_layout,
    update_chunk_,
)

__all__ = [
    "BLOCK",
    "CHUNK",
    "GRAD_LIMIT",
    "STATE_FORMATS",
    "WEIGHT_PRECISIONS",
    "AdamRule",
    "AdanRule",
    "UpdateSpec",
    "finite",
    "formats_for",
    "load_master_",
    "make_storage",
    "master",
    "slice_storage",
    "spec_from_config",
    "storage_layout",
    "update_chunk_",
]

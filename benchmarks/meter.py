"""What a piece of code does to memory: how much it takes at most, and how often it goes over it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Within ``with Meter() as meter`` every torch operation is counted.

    ``peak``: bytes of the new tensors alive at once, at most. ``kernels``: operations that go over at least
    ``least`` elements. ``traffic``: bytes that they read and write.
    """

    def __init__(self, least: int = 1) -> None:
        super().__init__()
        self.least = least
        self.live = self.peak = self.kernels = self.traffic = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in read}
        new = [t for t in made if t.untyped_storage().data_ptr() not in known]
        for t in new:
            storage = t.untyped_storage()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self.live)
        written = made if func._schema.is_mutable else new
        touched = [*read, *written]
        if written and max((t.numel() for t in touched), default=0) >= self.least:
            self.kernels += 1
            self.traffic += sum(t.numel() * t.element_size() for t in touched)
        return result

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes


def traffic_per_element(call: Callable[[], object], numel: int) -> tuple[int, float]:
    """Kernels over ``numel`` elements, and bytes read and written per element, of ``call()``."""
    with Meter(least=numel // 2) as meter:
        call()
    return meter.kernels, meter.traffic / numel


def extra_memory(call: Callable[[], object]) -> int:
    """Bytes of new tensors alive at once in ``call()``, at most."""
    with Meter() as meter:
        call()
    return meter.peak


"""The fused backward pass, for other people's loops: each parameter steps as soon as its gradient is there."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor, nn

from .offload import OffloadOptimizer


class FusedBackward:
    """The hooks that ``fuse_backward`` placed; ``remove()``, or leaving a ``with``, takes them away."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Gradients are kept again, and ``optimizer.step()`` uses them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> FusedBackward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def fuse_backward(module: nn.Module, optimizer: OffloadOptimizer) -> FusedBackward:
    """Let ``loss.backward()`` update each parameter as soon as its gradient is there, and free the gradient.

    So one gradient exists at a time. Every backward pass is then a step: gradients cannot be accumulated over
    several, and the norm of all of them is known only afterwards (see ``clip``). ``optimizer.step()`` finds no
    gradients and does nothing, so loops and schedulers that call it go on working.
    """
    groups = {p: group for p, group in optimizer.parameters()}

    def hook(p: Tensor) -> None:
        optimizer.step_parameter(p, groups[p])
        p.grad = None

    own = [p for p in module.parameters() if p in groups and p.requires_grad]
    if not own:
        raise ValueError("the optimizer has none of the module's parameters: build it from module.parameters()")
    return FusedBackward([p.register_post_accumulate_grad_hook(hook) for p in own])

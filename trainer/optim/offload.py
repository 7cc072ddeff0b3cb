"""The torch optimizers: packed states in host memory, updates in chunks, bit-exact saving and loading."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from . import saving
from .base import (
    BLOCK,
    CHUNK,
    Rule,
    UpdateSpec,
    count_kept,
    finite,
    formats_for,
    make_storage,
    mask_rescale,
    slice_storage,
    update_chunk_,
)
from .formats import rows_of

CROSSING = 1 << 20
"""Elements whose states cross over to a GPU at once. A multiple of every format's unit."""
CLIPS = (None, "tensor", "previous")
_Key = tuple[Any, ...]


class OffloadOptimizer(torch.optim.Optimizer):
    """What ``AdamOffload`` and the others share. ``rule_of`` makes the rule from a group's settings.

    Parameters are float32 or bf16. Those on a GPU have their states in host memory (unless ``offload`` is False), and
    each chunk of them crosses over and back for its update; on a CPU they are updated where they are. A gradient that
    is not finite leaves its tensor, weight and states, as they were, and counts in ``skipped``; the step number goes
    on.

    The states are in ``optimizer.state[p]``: ``step``, and the packed tensors by name. The parameters stand in
    one arena in their order, each from a multiple of 256 on, which numbers their elements for the counted rounding.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        state_format: str | Mapping[str, str] = "log16",
        weight_precision: str = "split",
        seed: int = 0,
        clip: str | None = None,
        max_norm: float = 1.0,
        compile: bool = False,
        offload: bool = True,
    ) -> None:
        lr = defaults["lr"]
        if not 0 <= float(lr) < float("inf"):
            raise ValueError(f"learning rate is {lr!r}: give a number of at least 0")
        if clip not in CLIPS:
            raise ValueError(f"clip is {clip!r}: choose one of {', '.join(map(str, CLIPS))}")
        if not 0 < max_norm < float("inf"):
            raise ValueError(f"max_norm is {max_norm!r}: give a number above 0")
        self.seed, self.clip, self.max_norm, self.compile, self.offload = seed, clip, max_norm, compile, offload
        self._specs: dict[_Key, UpdateSpec] = {}
        self._offsets: dict[Tensor, int] = {}
        self._end = 0
        self._stepped: set[Tensor] = set()
        super().__init__(params, {**defaults, "state_format": state_format, "weight_precision": weight_precision})
        device = next(iter(self._offsets)).device
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """How many updates of a tensor were left out (0-d, on the first parameter's device; reading it waits)."""
        self._norm_sq = torch.zeros((), dtype=torch.float32, device=device)
        self._previous_norm_sq: Tensor | None = None

    @staticmethod
    def rule_of(group: Mapping[str, Any]) -> Rule:
        """The update rule of a parameter group."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own (``state_format`` and ``weight_precision`` too)."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.spec_of(group)
        for p in group["params"]:
            make_storage(self.spec_of(group), 0, p.dtype)  # raises for a dtype that cannot be trained
            self._offsets[p] = self._end
            self._end += rows_of(p.numel()) * BLOCK

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._new_round()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.step_parameter(p, group)
        return loss

    @torch.no_grad()
    def step_parameter(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Update one parameter of ``group`` from its gradient. A second update of it begins a new step."""
        assert p.grad is not None
        if p.grad.is_sparse:
            raise ValueError(f"a gradient of shape {list(p.shape)} is sparse: use dense gradients")
        if p in self._stepped:
            self._new_round()
        self._stepped.add(p)
        spec = self.spec_of(group)
        state = self.state[p]
        if not state:
            device = torch.device("cpu") if self.offload else p.device
            self.adopt(p, {"step": 0, **make_storage(spec, p.numel(), p.dtype, device)})
            state = self.state[p]
        state["step"] += 1
        if p.numel() == 0:
            return
        grad = p.grad.detach().contiguous().view(-1)
        weight = p.detach().contiguous().view(-1)
        ok = finite(grad)
        self.skipped += (~ok).to(self.skipped.device, non_blocking=True)
        scale = self._scale(grad, ok)
        self._update(spec, weight, grad, state, self._offsets[p], float(group["lr"]), ok, scale)
        if not p.is_contiguous():
            p.copy_(weight.view(p.shape))

    def adopt(self, p: Tensor, state: dict[str, Any]) -> None:
        """Make ``state`` (the step and the storage) that of ``p``."""
        self.state[p] = state
        if p.device.type == "cuda":
            for part in _storage(state).values():
                if part.device.type == "cpu":
                    _pin(part)

    def _update(
        self, spec: UpdateSpec, weight: Tensor, grad: Tensor, state: dict[str, Any], offset: int, lr: float,
        ok: Tensor, scale: Tensor | None,
    ) -> None:  # fmt: skip
        storage, step, numel = _storage(state), state["step"], weight.numel()
        crossing = _crosses(storage, weight.device)
        size = CROSSING if crossing else CHUNK
        cuts = [(start, min(start + size, numel)) for start in range(0, numel, size)]
        rescale = None
        if spec.rule.rescales:
            read = {name: part for name, part in storage.items() if not name.startswith("exp_avg_sq")}
            kept = torch.zeros((), dtype=torch.int64, device=weight.device)
            for start, stop in cuts:
                near = _to(weight.device, slice_storage(read, start, stop, numel))
                kept += count_kept(
                    spec, weight[start:stop], grad[start:stop], near, lr=lr, step=step, scale=scale
                )  # fmt: skip
            rescale = mask_rescale(kept, numel)
        for start, stop in cuts:
            home = slice_storage(storage, start, stop, numel)
            near = _to(weight.device, home)
            update_chunk_(
                spec, weight[start:stop], grad[start:stop], near,
                lr=lr, step=step, offset=offset + start, ok=ok, scale=scale, rescale=rescale,
            )  # fmt: skip
            if crossing:
                for name, part in home.items():
                    part.copy_(near[name], non_blocking=True)

    def spec_of(self, group: Mapping[str, Any]) -> UpdateSpec:
        """The arithmetic and formats of a group as its settings now are."""
        rule = self.rule_of(group)
        formats, precision = formats_for(rule, group["state_format"]), group["weight_precision"]
        key = (rule, *formats.items(), precision)
        if key not in self._specs:
            if len(self._specs) > 100:  # a schedule may change betas at every step
                self._specs.clear()
            self._specs[key] = UpdateSpec(
                rule=rule, state_format=formats, weight_precision=precision, seed=self.seed, compile=self.compile
            )
        return self._specs[key]

    def _new_round(self) -> None:
        """A new step begins: the squares gathered so far are those of the step before."""
        if self._stepped and self.clip == "previous":
            self._previous_norm_sq, self._norm_sq = self._norm_sq, torch.zeros_like(self._norm_sq)
        self._stepped.clear()

    def _scale(self, grad: Tensor, ok: Tensor) -> Tensor | None:
        """The factor that clips this gradient, 0-d on its device."""
        if self.clip is None:
            return None
        squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grad.split(CHUNK)]).square()
        norm_sq = squares.sum()
        if self.clip == "previous":
            self._norm_sq += torch.where(ok, norm_sq, 0.0).to(self._norm_sq.device, non_blocking=True)
            if self._previous_norm_sq is None:
                return None
            norm_sq = self._previous_norm_sq.to(grad.device, non_blocking=True)
        return (self.max_norm / (norm_sq.sqrt() + 1e-6)).clamp(max=1.0)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the packed states as they are, and under ``offload`` what clipping and counting remember."""
        saving.settle(self)
        return {**super().state_dict(), "offload": saving.remembered(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Take over what ``state_dict`` gave, bit for bit: unlike by torch's own, nothing is cast."""
        saving.load_state_dict(self, state_dict)

    def save(self, path: saving.PathLike) -> None:
        """Write states and settings to a safetensors file, chunk by chunk; an older file stays whole until the end.

        The parameters themselves belong to the model: save them beside it, in their own dtypes.
        """
        saving.save(self, path)

    def load(self, path: saving.PathLike) -> None:
        """Read a file that ``save`` wrote: stepping on gives the same bits as if nothing had happened between.

        Raises ``ValueError`` (one line) if it was written for other parameters, formats or another kind of optimizer.
        """
        saving.load(self, path)

    def parameters(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Every parameter, in order, with its group."""
        for group in self.param_groups:
            for p in group["params"]:
                yield p, group



def _storage(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: part for name, part in state.items() if isinstance(part, Tensor)}


def _crosses(storage: Mapping[str, Tensor], device: torch.device) -> bool:
    return any(part.device != device for part in storage.values())


def _to(device: torch.device, storage: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.to(device, non_blocking=True) for name, part in storage.items()}


def _pin(part: Tensor) -> None:
    """Lock host memory in place, so that copies to a GPU need no detour. Where that fails they are only slower.

    What is there is registered, since torch's own pinned allocations take up to twice the memory.
    """
    runtime: Any = torch.cuda.cudart()
    start = part.data_ptr()
    if part.nbytes and int(runtime.cudaHostRegister(start, part.nbytes, 0)) == 0:
        weakref.finalize(part, runtime.cudaHostUnregister, start)

"""Will it fit, and what has to live in host memory? Decided from sizes alone, before anything is loaded.

All figures are bytes unless a name says GiB. Where one is a guess it is a high one, since a plan
that is too tight costs a run.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import AUTO, OptimizerConfig, RunConfig

if TYPE_CHECKING:
    from ..flux.variants import FileInfo

GIB = 1 << 30
TEXT_TOKENS = 512
"""Text tokens per picture that the plan assumes (dev; schnell has 256)."""
ACTIVATIONS = 42
"""Values per token and hidden unit at the peak of a double block's backward pass: 29.3 are saved by autograd (counted
with saved-tensor hooks; a single block saves 27.3), the rest is for the gradients on their way."""
CONTEXT = int(1.5 * GIB)
"""VRAM that the GPU's driver, its libraries and the allocator's slack take."""
PROCESS = 2 * GIB
"""Host memory of the process itself: Python, torch, its libraries."""
UPDATE = 256 << 20
"""Temporaries of a chunked update."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was decided for a run, and the memory it is expected to take."""

    device: str
    """``cpu`` or ``cuda:N``."""
    blocks_to_swap: int
    """Blocks that live in host memory between uses."""
    activation_offload: bool
    """Whether the blocks' inputs wait in host memory during a step."""
    micro_batch: int
    """Pictures that pass a block at once; 0: all."""
    fits: bool
    """Whether VRAM and RAM are enough."""
    vram_gb: float
    """GiB of VRAM at the peak of a step; 0 on a CPU."""
    ram_gb: float
    """GiB of host memory at the peak."""
    items: dict[str, float] = field(default_factory=dict)
    """GiB by what takes it."""
    reasons: tuple[str, ...] = ()
    """Why it was decided so, and what to do if it does not fit: one sentence each."""


@dataclass(frozen=True)
class Machine:
    """Bytes that the plan may use."""

    device: str
    vram_free: int
    ram_total: int


def block_sizes(flux: dict[str, Any]) -> tuple[int, int, int]:
    """Parameters of one double block, of one single block, and of all the rest (biases and norms left out)."""
    c, mlp = flux["hidden_size"], int(flux["hidden_size"] * flux.get("mlp_ratio", 4.0))
    double = 2 * (6 * c * c + 3 * c * c + c * c + 2 * c * mlp)
    single = 3 * c * c + c * (3 * c + mlp) + (c + mlp) * c
    embedders = (2 if flux["guidance_embed"] else 1) * (256 * c + c * c) + flux["vec_in_dim"] * c + c * c
    rest = embedders + c * (flux["in_channels"] + flux["context_in_dim"]) + 2 * c * c + c * flux["out_channels"]
    return double, single, rest


def state_bytes(optimizer: OptimizerConfig) -> float:
    """Host bytes per parameter of what the optimizer keeps: its states, and the masters' residuals."""
    import torch

    from ..optim.base import spec_from_config, storage_layout

    dtype, numel = (torch.float32 if optimizer.weight_precision == "f32" else torch.bfloat16), 1 << 16
    layout = storage_layout(spec_from_config(optimizer, 0), numel, dtype)
    return sum(math.prod(shape) * kind.itemsize for kind, shape in layout.values()) / numel


def resolve(
    config: RunConfig, info: FileInfo, shapes: Sequence[tuple[int, int]], machine: Machine | None = None
) -> Plan:
    """The plan for a run on latents of ``shapes`` (h, w). ``machine`` stands in for this one."""
    machine = machine or this_machine(config.memory.device, config.memory.reserve_vram_gb)
    assert info.flux is not None
    count = info.flux["depth"] + info.flux["depth_single_blocks"]
    on_gpu, memory = machine.device != "cpu", config.memory
    swaps = (
        range(count + 1) if memory.blocks_to_swap == AUTO and on_gpu else [min(max(memory.blocks_to_swap, 0), count)]
    )
    offloads = {"on": [True], "off": [False], "auto": [False, True] if on_gpu else [False]}[memory.activation_offload]

    choices = [_measure(config, info.flux, shapes, swap, offload, on_gpu) for swap in swaps for offload in offloads]
    fitting = [c for c in choices if not on_gpu or c["vram"] <= machine.vram_free]
    # Of what fits, whatever moves the fewest bytes in a step; if nothing does, whatever comes nearest.
    chosen = min(fitting, key=lambda c: c["moved"]) if fitting else min(choices, key=lambda c: c["vram"])
    reasons = []
    if on_gpu:
        reasons.append(
            f"{chosen['swap']} of {count} blocks wait in host memory, activations "
            f"{'too' if chosen['offload'] else 'stay on the GPU'}: the least to move that fits "
            f"{machine.vram_free / GIB:.1f} GiB of free VRAM"
            if fitting
            else f"a step needs {chosen['vram'] / GIB:.1f} GiB of VRAM, {machine.vram_free / GIB:.1f} GiB are free: "
            "lower micro_batch or resolution, or close other programs that use the GPU"
        )
    enough_ram = chosen["ram"] <= machine.ram_total
    if not enough_ram:
        reasons.append(
            f"training needs {chosen['ram'] / GIB:.1f} GiB of RAM and {machine.ram_total / GIB:.1f} GiB are "
            "here: choose a smaller state format or an optimizer with fewer states"
        )
    return Plan(
        device=machine.device,
        blocks_to_swap=chosen["swap"],
        activation_offload=chosen["offload"],
        micro_batch=memory.micro_batch,
        fits=bool(fitting) and enough_ram,
        vram_gb=round(chosen["vram"] / GIB, 2),
        ram_gb=round(chosen["ram"] / GIB, 2),
        items={k: round(v / GIB, 3) for k, v in chosen["items"].items()},
        reasons=tuple(reasons),
    )


def _measure(
    config: RunConfig, flux: dict[str, Any], shapes: Sequence[tuple[int, int]], swap: int, offload: bool, on_gpu: bool
) -> dict[str, Any]:
    """Bytes on the device, in host memory and moved in a step, with ``swap`` blocks swapped."""
    double, single, rest = block_sizes(flux)
    weight = 4 if config.optimizer.weight_precision == "f32" else 2
    doubles = min(swap, flux["depth"])
    swapped = doubles * double + (swap - doubles) * single
    total = flux["depth"] * double + flux["depth_single_blocks"] * single + rest
    largest = max(double if flux["depth"] else 0, single if flux["depth_single_blocks"] else 0, rest)
    pictures = config.recipe.batch_size
    tokens = max(-(-h // 2) * -(-w // 2) for h, w in shapes) + TEXT_TOKENS
    stream = pictures * tokens * flux["hidden_size"] * weight
    inputs = stream * (flux["depth"] + flux["depth_single_blocks"] + 1)

    device = {
        "weights on the device": (total - swapped) * weight,
        "slot for swapped weights": largest * weight if swap else 0,
        "gradients of one block": largest * (4 + weight),
        "activations of one block": stream * ACTIVATIONS * (config.memory.micro_batch or pictures) // pictures,
        "block inputs": 0 if offload else inputs,
        "update": UPDATE,
    }
    states = total * state_bytes(config.optimizer)
    host = {"weights": total * weight, "optimizer states": states, "process": PROCESS}
    if on_gpu:
        device["driver and allocator"] = CONTEXT
        if offload:
            host["block inputs"] = inputs
    else:
        device.pop("weights on the device")
        host |= device
    return {
        "swap": swap,
        "offload": offload,
        "items": ({f"GPU: {k}": v for k, v in device.items()} if on_gpu else {}) | host,
        "vram": sum(device.values()) if on_gpu else 0,
        "ram": sum(host.values()),
        "moved": 3 * swapped * weight + (2 * inputs if offload else 0),
    }


def this_machine(device: str, reserve_gb: float) -> Machine:
    """What this machine offers on ``device``. Raises ``ValueError`` for a device that is not there."""
    ram = total_ram()
    if device == "cpu":
        return Machine("cpu", 0, ram)
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            return Machine("cpu", 0, ram)
        raise ValueError(f"device is {device!r}, but torch finds no GPU here: choose auto or cpu")
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, but there are {torch.cuda.device_count()} GPUs: the first is cuda:0")
    free, _ = torch.cuda.mem_get_info(index)
    return Machine(f"cuda:{index}", max(free - int(reserve_gb * GIB), 0), ram)


def total_ram() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit where that is lower."""
    import psutil

    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            text = Path(path).read_text(encoding="ascii").strip()
            if text.isdigit():
                total = min(total, int(text))
    return total


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON types."""
    return dataclasses.asdict(plan) | {"reasons": list(plan.reasons)}


def from_dict(data: dict[str, Any]) -> Plan:
    """The plan that ``to_dict`` was given."""
    return Plan(**{**data, "reasons": tuple(data["reasons"])})

"""How fast an update is (``python -m benchmarks.optimizer --json``), beside torch's AdamW and 8-bit peers.

64 million parameters in Flux's shapes; all optimizers in one process, step by step in turn, medians of five. The last
line is one JSON object: by optimizer ``mparams_per_s``, ``bytes_per_param`` (weight, what belongs to it, and states)
and ``ratio_to_foreach``; of ours also ``kernels`` and ``traffic`` (eager operations over a tile, and the bytes per
parameter that they read and write) and ``extra_mb``, the memory of a step beyond the states; on a GPU
``share_of_copy``, the share of the device's copy bandwidth that 18 bytes per parameter make. States are on the device.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optim import (
    STATE_FORMATS,
    AdamRule,
    AdanOffload,
    NAdamOffload,
    UpdateSpec,
    formats_for,
    make_storage,
    update_chunk_,
)

from .meter import extra_memory, traffic_per_element

SHAPES = [
    (9216, 3072), (3072, 3072), (3072, 3072), (3072, 4096), (3072, 768), (3072, 256), (3072, 256), (64, 3072),
    (9216,), (3072,), (12288,), (128,), (128,),
]  # fmt: skip
"""Some of a double block's matrices and of those beside the blocks, with biases and norm scales: 63.9 M parameters."""
FOREACH, CHOSEN = "torch AdamW foreach f32", "NAdamOffload log16+split"
BYTES_MOVED = 18
"""What one pass must move per parameter with 16-bit states: 2 gradient, 2 x (2 weight, 2 residual, 2 + 2 states)."""


def candidates(compiled: bool) -> dict[str, tuple[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]]:
    """By name: a dtype's name and what makes the optimizer."""
    found: dict[str, Any] = {
        FOREACH: ("float32", lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True)),
        "torch AdamW fused f32": ("float32", lambda p: torch.optim.AdamW(p, lr=1e-5, fused=True)),
        "torchao AdamW8bit bf16": ("bfloat16", lambda p: _peer("torchao.optim", p, bf16_stochastic_round=True)),
        "bitsandbytes AdamW8bit bf16": ("bfloat16", lambda p: _peer("bitsandbytes.optim", p)),
    }
    for kind in STATE_FORMATS:
        found[f"NAdamOffload {kind}+split"] = ("bfloat16", lambda p, kind=kind: _ours(NAdamOffload, p, kind))
    found["NAdamOffload log16+stochastic"] = (
        "bfloat16", lambda p: _ours(NAdamOffload, p, "log16", weight_precision="stochastic"),
    )  # fmt: skip
    found["AdanOffload log16+split"] = ("bfloat16", lambda p: _ours(AdanOffload, p, "log16"))
    if compiled:
        found[CHOSEN + " compiled"] = ("bfloat16", lambda p: _ours(NAdamOffload, p, "log16", compile=True))
    return found


def _ours(make: Any, params: list[nn.Parameter], kind: str, **settings: Any) -> torch.optim.Optimizer:
    return make(params, lr=1e-5, state_format=kind, offload=False, **settings)


def _peer(module: str, params: list[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    return importlib.import_module(module).AdamW8bit(params, lr=1e-5, **settings)


def parameters(dtype: torch.dtype, device: torch.device, share: float) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(max(1, int(s[0] * share)), *s[1:]) for s in SHAPES]
    return [
        nn.Parameter(torch.randn(s, generator=generator, device=device, dtype=torch.float32).to(dtype) * 0.02)
        for s in shapes
    ]  # fmt: skip


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor in the optimizer's states; tensor subclasses are counted by their parts."""

    def parts(value: Any) -> list[Tensor]:
        if isinstance(value, dict):
            return [t for inner in value.values() for t in parts(inner)]
        if not isinstance(value, Tensor):
            return []
        flatten: Any = getattr(value, "__tensor_flatten__", None)
        return [value] if flatten is None else [t for name in flatten()[0] for t in parts(getattr(value, name))]

    seen = {t.data_ptr(): t.nbytes for state in optimizer.state.values() for t in parts(dict(state)) if t.nbytes}
    return sum(seen.values())


def measure(device: torch.device, share: float, rounds: int, compiled: bool) -> dict[str, dict[str, Any]]:
    """The figures of every candidate; one that cannot run here has an ``error`` instead."""
    running: dict[str, tuple[torch.optim.Optimizer, int]] = {}
    table: dict[str, dict[str, Any]] = {}
    grads: dict[torch.dtype, list[Tensor]] = {}
    for name, (dtype_name, make) in candidates(compiled).items():
        dtype = getattr(torch, dtype_name)
        params = parameters(dtype, device, share)
        if dtype not in grads:
            grads[dtype] = [torch.randn_like(p) * 1e-4 for p in params]
        for p, grad in zip(params, grads[dtype], strict=True):
            p.grad = grad
        numel = sum(p.numel() for p in params)
        try:
            optimizer = make(params)
            for _ in range(2):  # states are made, and code is compiled
                optimizer.step()
            wait(device)
        except Exception as error:  # a peer may not be installed, or not support this device
            table[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        size = state_bytes(optimizer) + sum(p.nbytes for p in params)
        table[name] = {"bytes_per_param": size / numel}
        running[name] = (optimizer, numel)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, (optimizer, _) in running.items():
            wait(device)
            began = time.perf_counter()
            optimizer.step()
            wait(device)
            seconds[name].append(time.perf_counter() - began)
    for name, (_, numel) in running.items():
        table[name]["mparams_per_s"] = numel / statistics.median(seconds[name]) / 1e6
    for name in running:
        table[name]["ratio_to_foreach"] = table[name]["mparams_per_s"] / table[FOREACH]["mparams_per_s"]
    return table


def passes(device: torch.device) -> dict[str, dict[str, float]]:
    """Operations, bytes and extra memory of the eager update, by format, for bf16 weights and ``split``."""
    found = {}
    rule = AdamRule(nesterov=True, cautious=True)
    for kind in STATE_FORMATS:
        spec = UpdateSpec(rule=rule, state_format=formats_for(rule, kind))

        def update(numel: int, spec: UpdateSpec = spec) -> Callable[[], None]:
            weight = torch.zeros(numel, dtype=torch.bfloat16, device=device)
            storage, grad = make_storage(spec, numel, weight.dtype, device), torch.ones_like(weight)
            return lambda: update_chunk_(spec, weight, grad, storage, lr=1e-5, step=1)

        kernels, traffic = traffic_per_element(update(1 << 18), 1 << 18)
        found[f"NAdamOffload {kind}+split"] = {
            "kernels": kernels, "traffic": traffic, "extra_mb": extra_memory(update(1 << 22)) / 1e6,
        }  # fmt: skip
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    a = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    times = []
    for _ in range(7):
        wait(device)
        began = time.perf_counter()
        b.copy_(a)
        wait(device)
        times.append(time.perf_counter() - began)
    return 2 * a.nbytes / statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the size: to try it, not to quote")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled update out")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    share = 1 / 16 if arguments.quick else 1.0
    table = measure(device, share, 5, not arguments.no_compile)
    for name, row in passes(device).items():
        table[name].update(row)
    copy = copy_bandwidth(device)
    for name, row in table.items():
        if device.type == "cuda" and "log16+split" in name and "mparams_per_s" in row:
            row["share_of_copy"] = BYTES_MOVED * row["mparams_per_s"] * 1e6 / copy
    out = sys.stdout.write
    out(f"{'optimizer':36}{'M/s':>9}{'bytes':>8}{'ratio':>8}\n")
    for name, row in table.items():
        if "error" in row:
            out(f"{name:36}{row['error'][:80]}\n")
        else:
            out(f"{name:36}{row['mparams_per_s']:9.1f}{row['bytes_per_param']:8.2f}{row['ratio_to_foreach']:8.2f}\n")
    if arguments.json:
        head = {"device": str(device), "threads": torch.get_num_threads(), "copy_gb_per_s": copy / 1e9}
        out(json.dumps({**head, "optimizers": table}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The doctor's checks, one function each. Bytes are counted in 10^9."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import OptimizerConfig, RecipeConfig
from ..flux.model import TINY, Flux, FluxParams, build_meta, init_weights_, patchify
from ..optim.base import make_storage, spec_from_config, update_chunk_
from .pinned import PinnedMemory, cuda_register
from .streams import BlockingStreams, Streams, streams_for

COPY_BYTES = 256 << 20
PIN_STEP = 1 << 30
PIN_LEFT = 6 << 30
"""Bytes that the pinning check leaves alone."""


def streamed_equals_resident(device: str, steps: int = 3, streams: Callable[[], Streams] | None = None) -> bool:
    """Whether small Fluxes have the same bits when everything is resident and copied while all else waits, and when
    everything is streamed. ``streams`` makes those to be examined, in place of the device's."""
    target = torch.device(device)
    wide = FluxParams(hidden_size=1536, num_heads=12, depth=1, depth_single_blocks=2, context_in_dim=512)
    small = FluxParams(**{**TINY.__dict__, "depth": 2, "depth_single_blocks": 4})
    for params in (small, wide) if target.type == "cuda" else (small,):
        blocking = BlockingStreams(target) if target.type == "cuda" else Streams()
        plain = _train(params, target, blocking, steps, swap=0, offload=False)
        made = streams() if streams is not None else streams_for(target)
        moved = _train(params, target, made, steps, swap=params.depth + params.depth_single_blocks, offload=True)
        if not all(torch.equal(plain[name], moved[name]) for name in plain):
            return False
    return True


def _train(
    params: FluxParams, device: torch.device, streams: Streams, steps: int, *, swap: int, offload: bool
) -> dict[str, Tensor]:
    """Weights and states after ``steps`` steps of the engine's parts, by name."""
    from ..walk import MicroBatch, build_stages, walk_back, walk_out
    from .conveyor import Conveyor, Keeper

    conveyor = Conveyor(device, streams)
    keeper = Keeper(conveyor, offload=offload)
    model = build_meta(params).to_empty(device="cpu").requires_grad_(True)
    start = init_weights_(Flux(params), 0).state_dict()
    spec = spec_from_config(OptimizerConfig(lr=1e-3), 0)
    stages = build_stages(model, RecipeConfig(), spec, conveyor, swap)
    for group in (g for stage in stages for g in stage.arena.groups):
        for piece in group.pieces:
            piece.view(group.home["weight"]).copy_(start[piece.name])
    *body, head = stages
    back = [head, *reversed(body)]
    g = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        x, t = torch.randn(2, 16, 8, 8, generator=g), torch.rand(2, generator=g)
        micro = MicroBatch(
            tokens=patchify(x).to(device),
            context=torch.randn(2, 16, params.context_in_dim, generator=g).to(device, torch.bfloat16),
            pooled=torch.randn(2, params.vec_in_dim, generator=g).to(device, torch.bfloat16),
            timestep=t.to(device),
            guidance=torch.ones(2, device=device),
            rope=model.rope(8, 8, 16, device),
            latent_size=(8, 8),
            target=torch.randn(2, 16, 8, 8, generator=g).to(device),
            share=0.5,
        )
        # Flash attention adds up gradients in no fixed order; this kernel does.
        with sdpa_kernel(SDPBackend.MATH):
            arenas = [stage.arena for stage in back]
            conveyor.begin([*(stage.arena for stage in body), *arenas], updates=arenas)
            walk_out(conveyor.visit, body, [micro], keeper)
            for stage in back:
                with conveyor.visit(stage.arena):
                    if stage is head:
                        walk_back(stage, micro, micro.hidden, add=False)
                    else:
                        with keeper.taken() as inputs:
                            walk_back(stage, micro, inputs, add=False)
                stage.arena.update(lr=1e-3, step=step)
    conveyor.park()
    return {
        f"{stage.name}.{group.label}.{name}": tensor.clone()
        for stage in stages
        for group in stage.arena.groups
        for name, tensor in group.home.tensors.items()
    }


def eager_because(device: torch.device) -> str:
    """Why updates on ``device`` do not go through the compiler; empty if they do."""
    if device.type == "cpu":
        return "small tiles are as fast on a CPU"
    from torch.utils._triton import has_triton

    return "" if has_triton() else "since Triton is not installed, or does not know this GPU"


def kernel_path(device: str) -> str:
    """Which code the engine's update runs through, and for ``eager`` why; ``compiled`` says if it gives other codes."""
    why = eager_because(torch.device(device))
    return f"eager, {why}" if why else compiled_path(device)


def compiled_path(device: str, numel: int = 1 << 22) -> str:
    """``compiled`` if compiled updates agree with eager ones on ``device``, else what is wrong with them."""
    spec, results = spec_from_config(OptimizerConfig(), 0), []
    for compile in (False, True):
        g = torch.Generator(device).manual_seed(0)
        weight = torch.randn(numel, generator=g, device=device).bfloat16()
        storage = make_storage(spec, numel, torch.bfloat16, device)
        try:
            for step in (1, 2):
                grad = torch.randn(numel, generator=g, device=device)
                update_chunk_(replace(spec, compile=compile), weight, grad, storage, lr=1e-4 * step, step=step)
        except Exception as error:
            return f"eager, since the compiler fails ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        results.append({"weight": weight, **storage})
    differ = [n for n, t in results[0].items() if (t.float() != results[1][n].float()).float().mean() > 1e-3]
    return f"compiled, with another {', '.join(differ)} than eager code" if differ else "compiled"


def matmul_tflops(device: str, seconds: float = 2.0) -> float:
    """10^12 operations per second of the products that fill most of a step."""
    on_gpu = device != "cpu"
    rows, inner, outer = (4608, 3072, 12288) if on_gpu else (512, 512, 2048)
    a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((rows, inner), (inner, outer)))
    seconds = seconds if on_gpu else 0.3

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    for _ in range(3):
        torch.mm(a, b)
    wait()
    started, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < seconds:
        for _ in range(10 if on_gpu else 1):
            torch.mm(a, b)
            done += 1
        wait()
    return 2.0 * rows * inner * outer * done / spent / 1e12 if done else 0.0


def copy_speeds(device: torch.device | str, repeats: int = 8) -> dict[str, float]:
    """10^9 bytes per second between pinned memory and the GPU: each way alone, and both at once."""
    device = torch.device(device)
    memory = PinnedMemory(register=partial(cuda_register, torch.device(device)))
    home = [memory.zeros([COPY_BYTES], torch.uint8) for _ in range(2)]
    memory.ready()
    here = [torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def measure(ways: tuple[str, ...]) -> float:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            if "up" in ways:
                with torch.cuda.stream(up):
                    here[0].copy_(home[0], non_blocking=True)
            if "down" in ways:
                with torch.cuda.stream(down):
                    home[1].copy_(here[1], non_blocking=True)
        torch.cuda.synchronize(device)
        return repeats * COPY_BYTES / (time.perf_counter() - started) / 1e9

    measure(("up", "down"))
    both = measure(("up", "down"))
    return {"h2d": measure(("up",)), "d2h": measure(("down",)), "h2d_both": both, "d2h_both": both}


def memory_speed(size: int = 256 << 20, repeats: int = 4) -> float:
    """10^9 bytes per second that the host's memory reads and writes together, by copies of torch's threads."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    target.copy_(source)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best / 1e9


def pinnable(free: int, device: torch.device | str) -> int:
    """Bytes that can be pinned for ``device``, found by doing so in steps; ``free``: bytes that nobody uses."""
    memory = PinnedMemory(register=partial(cuda_register, torch.device(device)))
    try:
        while memory.pinned + PIN_STEP + PIN_LEFT < free and not memory.refused:
            memory.zeros([PIN_STEP], torch.uint8)
            memory.ready()
        return memory.pinned
    finally:
        memory.release()


def disk_speed(folder: Path, size: int = 128 << 20) -> dict[str, float]:
    """10^9 bytes per second written to ``folder`` (until it is safe there) and read back, and GiB free."""
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(1 << 20)
    handle, name = tempfile.mkstemp(prefix=".doctor-", dir=folder)
    try:
        with open(handle, "wb") as file:
            started = time.perf_counter()
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - started
            if hasattr(os, "posix_fadvise"):  # or what is read comes from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with open(name, "rb", buffering=0) as file:
            while file.read(1 << 22):
                pass
        read = time.perf_counter() - started
    finally:
        os.unlink(name)
    free = shutil.disk_usage(folder).free / (1 << 30)
    return {"write": size / written / 1e9, "read": size / read / 1e9, "free": free}


def peak_rss() -> int:
    """The most bytes of host memory that this process has held so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

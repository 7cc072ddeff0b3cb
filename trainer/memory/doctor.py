"""``python -m trainer doctor``: does the engine work here, and how fast is what it stands on?

A few minutes at most, on a GPU or a CPU. What it measures goes into ``machine.json`` of the runs' folder, for the plan;
what it says ends in a block of text for a bug report.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checks
from .machine import GIB, SPEEDS_FILE, Speeds, free_ram, home, total_ram

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found. ``problems``: one sentence each; empty if all is well."""

    device: str
    system: dict[str, str]
    equal: bool
    """Whether streamed and resident training gave the same bits."""
    kernel_path: str
    """``compiled``, or ``eager`` and why."""
    speeds: Speeds
    copies: dict[str, float]
    """10^9 bytes per second: ``h2d`` and ``d2h`` alone, ``h2d_both`` and ``d2h_both`` at once; empty without a GPU."""
    pinnable_gb: float | None
    """GiB that could be pinned when asked, up to what is free; None without a GPU."""
    disk: dict[str, float]
    """10^9 bytes per second, ``write`` and ``read``, and GiB ``free``, of the runs' folder."""
    seconds: float
    problems: tuple[str, ...] = field(default=())


def examine(device: str = "auto", folder: Path | None = None, progress: Progress | None = None) -> Report:
    """Look at everything. ``folder``: where runs are kept. Raises ``ValueError`` for a device that is not there."""
    from .machine import this_machine

    started, folder = time.perf_counter(), folder or home()
    where = this_machine(device, 0.0, now=True, speeds=Speeds())
    problems: list[str] = []

    def tried(number: int, what: str, check: Callable[[], Any], otherwise: Any) -> Any:
        if progress is not None:
            progress(number, 7)
        try:
            return check()
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return otherwise

    system = tried(0, "system", lambda: system_facts(where.device), {})
    equal = tried(1, "streamed against resident", lambda: checks.streamed_equals_resident(where.device), False)
    if not equal and not problems:
        problems.append("streamed and resident training differ: please report this")
    path = tried(2, "update kernel", lambda: checks.kernel_path(where.device), "eager (the check failed)")
    tflops = tried(3, "matrix products", lambda: checks.matmul_tflops(where.device), 0.0)
    on_gpu = where.device != "cpu"
    copies = tried(4, "copies", lambda: checks.copy_speeds(where.device), {}) if on_gpu else {}
    dram = tried(5, "host memory", checks.memory_speed, 0.0)
    pinnable = tried(6, "pinning", lambda: checks.pinnable(free_ram(), where.device) / GIB, None) if on_gpu else None
    disk = tried(7, "disk", lambda: checks.disk_speed(folder), {})
    speeds = Speeds(tflops=tflops, h2d=copies.get("h2d_both", 0.0), d2h=copies.get("d2h_both", 0.0), dram=dram)
    return Report(
        device=where.device,
        system=system,
        equal=equal,
        kernel_path=path,
        speeds=speeds,
        copies=copies,
        pinnable_gb=pinnable,
        disk=disk,
        seconds=time.perf_counter() - started,
        problems=tuple(problems),
    )


def system_facts(device: str) -> dict[str, str]:
    """What a bug report should say of the machine and its software."""
    import torch

    facts = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": f"{os.cpu_count()} threads, {torch.get_num_threads()} used by torch",
        "ram": f"{total_ram() / GIB:.1f} GiB, {free_ram() / GIB:.1f} GiB free",
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        facts |= {
            "gpu": f"{properties.name}, compute {properties.major}.{properties.minor}",
            "vram": f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free",
            "cuda": f"{torch.version.cuda}",
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "default",
        }
    return facts


def keep(report: Report, path: Path) -> None:
    """Leave the speeds where the plan looks for them."""
    from ..files import write_json

    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"device": report.device, "system": report.system, "speeds": dataclasses.asdict(report.speeds)})


def text(report: Report) -> str:
    """The report for people, a block to paste: what is wrong, or that all is well, then the findings."""
    lines = [f"problem: {problem}" for problem in report.problems] or ["no problems found"]
    lines += [f"{name}: {value}" for name, value in report.system.items()]
    lines += [
        f"device: {report.device}",
        f"streamed equals resident: {'yes, bit for bit' if report.equal else 'NO'}",
        f"update kernel: {report.kernel_path}",
        f"bf16 matrix products: {report.speeds.tflops:.2f} TFLOP/s",
    ]
    if report.copies:
        both = f"{report.copies['h2d_both']:.1f} up and {report.copies['d2h_both']:.1f} down at once"
        lines.append(f"copies, GB/s: {report.copies['h2d']:.1f} up, {report.copies['d2h']:.1f} down, {both}")
    lines.append(f"host memory, read and written: {report.speeds.dram:.1f} GB/s")
    if report.pinnable_gb is not None:
        lines.append(f"can be pinned: {report.pinnable_gb:.0f} GiB at least")
    if report.disk:
        free = f"{report.disk['free']:.0f} GiB free"
        lines.append(f"disk, GB/s: {report.disk['write']:.2f} written, {report.disk['read']:.2f} read, {free}")
    lines.append(f"examined in {report.seconds:.0f} s")
    return "\n".join(["For a bug report:", "```", *lines, "```"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``doctor``."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--folder", type=Path, help="folder of the runs (FLUX_FFT_HOME, else output/flux_fft)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def main(args: argparse.Namespace) -> int:
    """``python -m trainer doctor``; exit code 1 where something is wrong."""
    folder = args.folder or home()
    report = examine(args.device, folder)
    keep(report, folder / SPEEDS_FILE)
    out = json.dumps(dataclasses.asdict(report) | {"text": text(report)}) if args.json else text(report)
    sys.stdout.write(out + "\n")
    return 1 if report.problems else 0

"""What this machine offers a run: host memory, GPU memory, how much of it can be pinned, and its measured speeds.

All figures are bytes, bytes per second and operations per second unless a name says GiB.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
DESKTOP = 6 * GIB
"""Host memory left to ComfyUI and the desktop."""
INSTALLED_SHARE = 0.98
"""Of the memory that is installed, what the system reports: firmware and kernel keep the rest."""
WINDOWS_PINNABLE = 0.4
"""Share of the RAM that Windows pins at most."""
SPEEDS_FILE = "machine.json"
"""Where the doctor leaves what it measured, in the home folder of the runs."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Rates of a machine. Zero: not known."""

    tflops: float = 0.0
    """10^12 operations per second of large bf16 products."""
    h2d: float = 0.0
    """10^9 bytes per second from pinned host memory to the GPU while the other way is busy too."""
    d2h: float = 0.0
    """10^9 bytes per second back."""
    dram: float = 0.0
    """10^9 bytes per second that the host's memory reads and writes together; 0: no limit."""

    @property
    def known(self) -> bool:
        """Whether they are enough to tell how long a step takes."""
        return self.tflops > 0 and self.h2d > 0 and self.d2h > 0


@dataclass(frozen=True)
class Machine:
    """What a run may use."""

    device: str
    """``cpu`` or ``cuda:N``."""
    vram_free: int
    """Bytes of GPU memory; 0 on a CPU."""
    ram_free: int
    """Bytes of host memory, what is left to other programs taken off."""
    ram_now: int | None = None
    """Bytes of host memory that nobody uses at this moment; None: not asked."""
    pinnable: int | None = None
    """Bytes that can be pinned; None: all."""
    speeds: Speeds = Speeds()
    disk_free: int | None = None
    """Bytes that a run may fill on the disk of the runs; None: not asked."""


def given(
    vram_gb: float, ram_gb: float, *, reserve_vram_gb: float = 1.0, speeds: Speeds = Speeds(), windows: bool = False
) -> Machine:
    """A machine with that much memory installed (GiB); 0 GiB of VRAM: no GPU."""
    ram = max(int(ram_gb * GIB * INSTALLED_SHARE) - DESKTOP, 0)
    pinnable = int(ram_gb * GIB * WINDOWS_PINNABLE) if windows else None
    if not vram_gb:
        return Machine("cpu", 0, ram, pinnable=pinnable, speeds=speeds)
    return Machine("cuda:0", max(int((vram_gb - reserve_vram_gb) * GIB), 0), ram, pinnable=pinnable, speeds=speeds)


def cap_vram(device: torch.device, reserve_vram_gb: float) -> None:
    """Let this process take what is free on ``device`` now, less the reserve, and no more.

    Beyond that Windows' driver would not refuse but use host memory, many times slower, in silence.
    """
    import torch

    free, total = torch.cuda.mem_get_info(device)
    share = (free - reserve_vram_gb * GIB) / total
    torch.cuda.set_per_process_memory_fraction(min(max(share, 0.05), 1.0), device)


def this_machine(
    device: str, reserve_vram_gb: float, *, now: bool = False, speeds: Speeds | None = None, folder: Path | None = None
) -> Machine:
    """What this machine offers on ``device``. Raises ``ValueError`` for a device that is not there.

    ``now``: what is free at this moment; else all, less the reserves (whoever asks before the training, inside ComfyUI,
    holds some of it himself, and a worker of the run may hold much). ``folder``: where the run is, or will be.
    """
    from .disk import room

    total, pinnable = total_ram(), pinnable_ram()
    ram = max(total - DESKTOP, total // 2)
    speeds = load_speeds() if speeds is None else speeds
    ram_now = free_ram() if now else None
    free = room(folder or home())
    on_cpu = Machine("cpu", 0, ram, ram_now, pinnable, speeds, free)
    if device == "cpu":
        return on_cpu
    import torch

    if not torch.cuda.is_available():
        if device == "auto":
            return on_cpu
        raise ValueError(f"device is {device!r}, but torch finds no GPU here: choose auto or cpu")
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, but there are {torch.cuda.device_count()} GPUs: the first is cuda:0")
    vram = torch.cuda.mem_get_info(index)[0 if now else 1]
    return Machine(f"cuda:{index}", max(vram - int(reserve_vram_gb * GIB), 0), ram, ram_now, pinnable, speeds, free)


def identity(device: str) -> str:
    """Names the device that ``device`` stands for here: another one means another plan."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(int(device.partition(":")[2] or 0))
            return f"{properties.name} {properties.total_memory}"
    return "cpu"


def pinnable_ram() -> int | None:
    """Bytes of host memory that this system pins; None: as many as there are."""
    return int(total_ram() * WINDOWS_PINNABLE) if sys.platform == "win32" else None


def total_ram() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit where that is lower."""
    import psutil

    limits = [psutil.virtual_memory().total, *(limit for limit, _ in _cgroups())]
    return min(limits)


def free_ram() -> int:
    """Bytes of memory that a new process could take now; on Windows within the commit limit."""
    import psutil

    free = [psutil.virtual_memory().available, *(max(limit - used, 0) for limit, used in _cgroups())]
    if sys.platform == "win32":
        free.append(_windows_commit_left())
    return min(free)


def resident_ram() -> int:
    """Bytes of host memory that this process holds now."""
    import psutil

    return psutil.Process().memory_info().rss


def _cgroups() -> list[tuple[int, int]]:
    """Limit and use of this process's container, in bytes; what it uses for cached files can be taken back."""
    found = []
    for folder, limit_name, used_name, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(Path(folder, limit_name)), _number(Path(folder, used_name))
        if limit is None:
            continue
        stat = Path(folder, "memory.stat")
        lines = stat.read_text(encoding="ascii").splitlines() if stat.exists() else []
        reclaimable = sum(int(line.split()[1]) for line in lines if line.split()[0] == cached)
        found.append((limit, max((used or 0) - reclaimable, 0)))
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _windows_commit_left() -> int:
    """Bytes that Windows still promises: RAM and page file, less what programs have asked for."""
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
            (name, ctypes.c_uint64)
            for name in ("total", "free", "commit_limit", "commit_left", "virtual", "virtual_left", "extended")
        ]

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.commit_left)


def home() -> Path:
    """Folder of the run directories, as far as the environment tells."""
    return Path(os.environ.get("FLUX_FFT_HOME", "").strip() or "output/flux_fft")


def load_speeds(path: Path | None = None) -> Speeds:
    """What the doctor measured on this machine, from ``path`` or the home folder; unknown where it did not."""
    path = path or home() / SPEEDS_FILE
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Speeds()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): run the doctor again, or delete it") from None
    try:
        speeds = data.get("speeds", {})
        return Speeds(**{name: float(speeds.get(name) or 0.0) for name in Speeds.__dataclass_fields__})
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{path} holds no speeds: run the doctor again, or delete it") from None

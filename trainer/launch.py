"""Starting a worker process, and telling what became of it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .run import RunDirectory

log = logging.getLogger(__name__)

STARTED = "worker started"
"""First line of each worker in ``worker.log``: its last words are looked for after the last one."""
ENDED = "worker ended"
"""Last line of a worker that ended in good order, its state written."""
EXIT_FAILED, EXIT_USER_ERROR, EXIT_LOCKED = 1, 2, 3
"""How a worker says that the run failed, that it could not begin (its last line says why), or that another had it
open."""
_PACK = Path(__file__).resolve().parent.parent
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""ComfyUI sets these for itself; its allocator must not be the worker's."""
_TAIL = 64 * 1024
_LOG_LIMIT = 4 << 20
IDLE_MINUTES = "FLUX_FFT_IDLE_MINUTES"
"""Environment variable: minutes without work after which a worker saves and exits (10)."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")
"""How a line of the log begins; the interpreter's own last words have no such beginning."""


class Child:
    """A worker process started here."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self._process = process

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it still runs after so long."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End it at once: for one that has not opened its run."""
        self._process.terminate()


def idle_seconds() -> float:
    """Seconds without work after which a worker saves and exits, by the environment."""
    text = os.environ.get(IDLE_MINUTES, "10")
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not minutes > 0:
        raise ValueError(f"{IDLE_MINUTES} is {text!r}: give a number of minutes above 0")
    return 60 * minutes


def start(run: RunDirectory, idle_exit: float | None = None) -> Child:
    """Start a worker of ``run`` in the background, away from this process's console and its Ctrl-C."""
    command = [sys.executable, str(_PACK / "trainer" / "__main__.py"), "worker", str(run.path)]
    if idle_exit is not None:
        command += ["--idle-exit", str(idle_exit)]
    environment = {k: v for k, v in os.environ.items() if k not in _ALLOCATOR}
    environment["PYTHONUTF8"] = "1"
    # Threads that spin while they wait for work take the cores from those that have some.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.flags.no_user_site:  # a portable Python: packages in the user's folder are another's
        environment["PYTHONNOUSERSITE"] = "1"
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}
    _shorten(run.log_file)
    with open(run.log_file, "ab") as output:
        # Not in the run directory: Windows cannot move or delete a folder that a process works in.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                                   cwd=tempfile.gettempdir(), **apart)
    log.info("started a worker for run %r", run.name)
    return Child(process)


def _shorten(path: Path) -> None:
    try:
        if path.stat().st_size > _LOG_LIMIT:
            os.replace(path, path.with_suffix(".old.log"))
    except OSError:
        pass  # there is none yet, or a worker writes to it


def ended_in_order(path: Path) -> bool:
    """Whether the newest worker in the log came to its proper end."""
    return any(_LOGGED.match(line) and line.endswith(ENDED) for line in _newest(path))


def last_words(path: Path) -> str:
    """The line in which the newest worker in the log says what killed it; empty if it died without a word."""
    lines = _newest(path)
    for place in range(len(lines) - 1, -1, -1):
        line = lines[place]
        if _LOGGED.match(line):
            break  # it lived on after whatever stands above
        if line.startswith("Fatal Python error:"):
            return line
        if line.startswith("Traceback (most recent call last)"):
            # The error follows the indented stack; its message may go on over further lines.
            said = [line for line in lines[place + 1 :] if line and not line[0].isspace()]
            return said[0] if said else ""
    return ""


def _newest(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read().decode("utf-8", "replace").rpartition(STARTED)[2].splitlines()
    except OSError:
        return []


def obituary(run: RunDirectory, code: int | None) -> str:
    """One line: which worker died, of what, and where the run goes on from. ``code``: how it exited, if known."""
    status, words = run.status(), last_words(run.log_file)
    said = [line for line in _newest(run.log_file) if line.strip()]
    if code == EXIT_USER_ERROR and said:
        cause = f"could not begin: {said[-1]}"
    elif words:
        cause = f"died: {words}"
    elif status["state"] == "failed" and status["error"]:
        cause = f"gave up: {status['error']}"
    elif code is None or code == -9:  # SIGKILL, which Windows does not have
        cause = "ended without a word: likely out of RAM (killed)"
    else:
        cause = f"ended without a word (exit code {code})"
    at = status["save_point_step"]
    onward = f"the run goes on from its save point at step {at}" if at else "the run has no save point yet"
    return f"the worker of run {run.name!r} {cause}; {onward} (worker.log in its folder says more)"

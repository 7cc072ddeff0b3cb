"""Starts many workers fast: a process that has imported torch and forks them; run as a script by ``Zygote``.

The forked processes are those of the product: ``worker`` is the worker's command, ``owner`` stands in for ComfyUI, has
the run trained and exports it again and again. Both can be killed like any process.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Zygote:
    """From the tests' side. Close it."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
        self._process = subprocess.Popen([sys.executable, __file__], cwd=ROOT, stdin=subprocess.PIPE, env=environment,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def fork(self, kind: str, *args: object) -> int:
        """Start one; its process id. ``worker RUN_DIR``, ``owner RUN_DIR EXPORT LAUNCH``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\t".join([kind, *map(str, args)]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def alive(pid: int) -> bool:
    """Whether a process that is not our child lives."""
    try:
        os.kill(pid, 0)
        # Where nobody reaps it, it stays in the table; it may go while that is read, too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # gone, or a system without such files
        return not Path("/proc/self/stat").exists()


def kill(*pids: int) -> None:
    """kill -9, all at once, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        while alive(pid):
            time.sleep(0.002)


def _worker(run_dir: str) -> int:
    from trainer.cli import main as cli
    from trainer.run import RunDirectory

    with open(RunDirectory(run_dir).log_file, "ab") as output:
        os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
    return cli.main(["worker", run_dir])


def _owner(run_dir: str, export: str, launch: str) -> int:
    from trainer.client import open_run

    client = open_run(run_dir, owner=True, launch=launch == "True")
    client.train(1_000_000)
    while True:
        if client.status(since=1 << 53)["step"] % 3 == 0:
            client.export(export, "bf16", overwrite=True)
        time.sleep(0.02)


def _serve() -> None:
    sys.path.insert(0, str(ROOT))
    import trainer.cli.main
    import trainer.client
    import trainer.export.write
    import trainer.loop
    import trainer.worker  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    for line in sys.stdin:
        kind, *args = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            code = 1
            try:
                code = {"worker": _worker, "owner": _owner}[kind](*args)
            finally:
                os._exit(code)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()

"""``python -m trainer verify``: whether what a run has on the disk is what was written there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..header import read_header
from ..run import RunDirectory
from ..saves import savepoints
from .control import write_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``verify``."""
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def main(args: argparse.Namespace) -> int:
    """Read all that a run has saved; exit code 1 if something is not as it was written."""
    run = RunDirectory(args.run_dir)
    found = verify(run)
    if args.json:
        write_line(json.dumps({"run": run.name, "saved": found}))
    else:
        for one in found:
            write_line(f"{one['file']}: {'whole' if not one['problems'] else '; '.join(one['problems'])}")
        if not found:
            write_line(f"run {run.name!r} has saved nothing")
    return 1 if any(one["problems"] for one in found) else 0


def verify(run: RunDirectory) -> list[dict[str, Any]]:
    """``file``, ``step`` and ``problems`` of each save point and checkpoint: sizes and hashes, or sizes and headers.

    What a worker removes meanwhile, since a newer one is whole, is left out.
    """
    _ = run.config, run.dataset  # in one line if they cannot be read
    points = {p.path: p.step for p in run.save_points()} | {p: s for s, p in savepoints.damaged(*run.saved_in)}
    found = [(path, step, savepoints.verify(path)) for path, step in points.items()]
    found += [(c.path, c.step, _header(c.path)) for c in run.checkpoints(damaged=True)]
    return [
        {"file": path.relative_to(run.path).as_posix(), "step": step, "problems": problems}
        for path, step, problems in sorted(found, key=lambda one: one[:2])
        if path.exists()
    ]


def _header(path: Path) -> list[str]:
    try:
        read_header(path)
        return []
    except (ValueError, OSError) as error:
        return [" ".join(str(error).split())]

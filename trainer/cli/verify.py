"""``python -m trainer verify``: whether what a run has on the disk is what was written there."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..run import RunDirectory
from ..saves import savepoints, weights_only
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
            whole = "whole" if one["hashed"] else "whole by its sizes (an older version wrote it, without a hash)"
            write_line(f"{one['file']}: {'; '.join(one['problems']) or whole}")
        if not found:
            write_line(f"run {run.name!r} has saved nothing")
    return 1 if any(one["problems"] for one in found) else 0


def verify(run: RunDirectory) -> list[dict[str, Any]]:
    """``file``, ``step`` and ``problems`` of each save point and checkpoint: by their sizes, and by their hashes where
    they are ``hashed``, which older versions did not.

    What a worker removes meanwhile, since a newer one is whole, is left out.
    """
    _ = run.config, run.dataset  # in one line if they cannot be read
    points = {p.path: p.step for p in run.save_points()} | {p: s for s, p in savepoints.damaged(*run.saved_in)}
    found = [(p, step, savepoints.verify(p), savepoints.hashed(p)) for p, step in points.items()]
    found += [(c.path, c.step, *weights_only.look(c.path)) for c in run.checkpoints(damaged=True)]
    return [
        {"file": path.relative_to(run.path).as_posix(), "step": step, "problems": problems, "hashed": hashed}
        for path, step, problems, hashed in sorted(found, key=lambda one: one[:2])
        if path.exists()
    ]

"""The command line in this process: one of its own costs seconds where torch is loaded."""

import contextlib
import io
import subprocess

from trainer.cli.main import main


def here(*args: object) -> subprocess.CompletedProcess:
    """``python -m trainer ARGS``: its exit code, and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in args])
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())

"""``python -m trainer``, and the script by whose path a worker is started."""

import contextlib
import logging
import os
import sys
from pathlib import Path

if __package__:
    from .cli.main import main
else:
    # Started by path (an embedded Python may read no PYTHONPATH and know no current folder). The script's own folder
    # must go: its modules would hide others of the same name.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _here]
    sys.path.insert(0, str(_here.parent))
    from trainer.cli.main import main

if __name__ == "__main__":
    _code = main()
    logging.shutdown()
    for _stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            _stream.flush()
    # Without the interpreter's teardown: native threads that still run then have been seen to abort a process whose
    # work was done and saved.
    os._exit(_code)

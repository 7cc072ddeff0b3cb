"""``python -m trainer``, and the script by whose path a worker is started."""

import sys
from pathlib import Path

if __package__:
    from .cli import main
else:
    # Started by path (an embedded Python may read no PYTHONPATH and know no current folder). The script's own folder
    # must go: its modules would hide others of the same name.
    _here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != _here]
    sys.path.insert(0, str(_here.parent))
    from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())

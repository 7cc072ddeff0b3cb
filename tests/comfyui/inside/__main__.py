"""Checks of the bridge that need ComfyUI's own classes: run by ComfyUI's interpreter, in its folder (see test_bridge).

``python inside PACK [NAME]`` prints one JSON object: the names of the checks that failed, and how. The checks are the
functions ``check_*`` of the modules ``check_*`` beside this one.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from given import load_pack


def main() -> None:
    modules = [importlib.import_module(path.stem) for path in sorted(Path(__file__).parent.glob("check_*.py"))]
    checks = {name: check for module in modules for name, check in vars(module).items() if name.startswith("check_")}
    pack, wanted = sys.argv[1], sys.argv[2:] or list(checks)
    sys.path.insert(0, ".")
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch
    import utils.extra_config  # noqa: F401  (first, as main.py does: others bring a module of that name)

    import nodes  # noqa: F401

    load_pack(pack)
    failed = {}
    with torch.inference_mode():  # as the executor runs nodes
        for name in wanted:
            try:
                checks[name]()
            except BaseException:
                failed[name] = traceback.format_exc()
    print("RESULT " + json.dumps({"failed": failed, "checks": list(checks)}))


if __name__ == "__main__":
    main()

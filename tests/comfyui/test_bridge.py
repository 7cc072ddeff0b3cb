"""The bridge against ComfyUI's own classes, inside of ComfyUI's interpreter (the checks are in ``inside``)."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui.server import PACK, Install

INSIDE = Path(__file__).with_name("inside")
CHECKS = [check for path in sorted(INSIDE.glob("check_*.py"))
          for check in re.findall(r"^def (check_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.fixture(scope="module")
def outcome(install: Install) -> dict[str, Any]:
    done = subprocess.run([install.python, INSIDE, PACK], cwd=install.path, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.parametrize("check", CHECKS)
def test_inside_comfyui(outcome: dict[str, Any], check: str) -> None:
    assert check in outcome["checks"]
    assert check not in outcome["failed"], outcome["failed"][check]

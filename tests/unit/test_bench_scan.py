"""The benchmark of the scan, tried small: its last line is JSON, and each kind is measured both ways."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.scan import KINDS

ROOT = Path(__file__).resolve().parents[2]


def test_it_ends_with_one_line_of_json():
    command = [sys.executable, "-m", "benchmarks.scan", "--json", "--turns", "1", "--share", "0.01"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert found["ratio"] > 0 and found["turns"] == 1 and found["cores"] >= 1
    assert list(found["kinds"]) == list(KINDS)
    for kind, row in found["kinds"].items():
        assert row["images"] == max(2, round(KINDS[kind][0] * 0.01))
        assert row["scan"] > 0 and row["pillow"] > 0 and row["ratio"] > 0

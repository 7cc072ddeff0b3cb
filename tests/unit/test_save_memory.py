"""Saving, loading and checkpoints take little memory beside the engine's, whatever its size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300e6
CODE = """
import json, os, resource, sys
from pathlib import Path
from benchmarks.save import UID, engine, extra_ram
from trainer.config import OptimizerConfig
from trainer.saves.savepoints import Source, write_save_point
from trainer.saves.weights_only import write_checkpoint

folder, preset, limited = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "limited"
trainer = engine(folder, preset, "cpu", OptimizerConfig())
trainer.step = 1
held = sum(t.nbytes for s in trainer.stages for g in s.arena.groups for t in (g.current, *g.storage.values()))
if limited:  # of what it may have: what it has, and no more than the limit beside that
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(line.split()[1]) * 1024 + 300_000_000,) * 2)
    try:
        bytearray(310_000_000)
        sys.exit("the limit limits nothing")
    except MemoryError:
        pass
deeds = {
    "save": lambda: write_save_point(folder / "state", UID, 1, trainer.save),
    "checkpoint": lambda: write_checkpoint(folder, UID, UID, 1, trainer.entries("bf16"), {}),
    "load": lambda: trainer.load(write_save_point(folder / "state", UID, 1, trainer.save)),
    "fresh": lambda: trainer.load(Source(1, folder / "state" / "step-000001", fresh=True)),
}
print(json.dumps({"held": held, **{name: extra_ram(deed) for name, deed in deeds.items()}}))
"""


def measured(folder: Path, preset: str, limited: bool) -> dict[str, int]:
    done = subprocess.run([sys.executable, "-c", CODE, str(folder), preset, "limited" if limited else ""], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a moment")
def test_a_model_of_a_third_of_a_billion_parameters_is_saved_within_300_mb_more(tmp_path):
    """Under a limit of the system, too: what asks for more gets none."""
    found = measured(tmp_path, "0.3b", limited=True)
    assert found.pop("held") > 2.5e9
    assert max(found.values()) < LIMIT, found
    assert found["save"] < 20e6 and found["load"] < 20e6, found  # from and to where it lies


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a moment")
def test_the_measure_notices_what_is_held():
    """In a process of its own, as where it is used: what other tests have left in this one comes and goes."""
    code = ("from benchmarks.save import extra_ram\n"
            "print(extra_ram(lambda: bytes(bytearray(b'x' * 80_000_000))), extra_ram(lambda: None))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    held, nothing = map(int, done.stdout.split())
    assert held > 70e6 and nothing < 20e6, (held, nothing)


def test_the_benchmark_has_its_fields(capsys):
    from benchmarks.save import main

    assert main(["--preset", "tiny", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ratio"] > 0 and found["extra_ram_mb"] < 100 and found["preset"] == "tiny"
    assert all(found[f"{name}_gb_s"] > 0 for name in ("save", "copy", "checkpoint", "load"))
    assert found["gb"] > 0.008

"""The architecture's arrows: who may import whom, and what must not cost ComfyUI's start anything."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINER = sorted(p.relative_to(ROOT) for p in (ROOT / "trainer").rglob("*.py"))
NODES = sorted(p.relative_to(ROOT) for p in (ROOT / "nodes").rglob("*.py"))
ENGINE_PARTS = ("flow", "optim", "memory", "flux")
"""Parts that know nothing of runs or processes."""
FOR_NODES = {"client", "config", "data", "demo", "demo_data", "memory.plan", "flux.variants", "plot", "protocol"}
FOR_NODES |= {"flux.lora", "memory.machine"}  # does it fit?
FOR_NODES |= {"run", "runs", "events", "compare", "saves.saved"}  # reading the run directory
FOR_NODES |= {"files", "header", "progress", "settings"}  # small files, and figures as words
"""What the nodes may use of the trainer."""
TORCH_FREE = ("trainer.config", "trainer.run", "trainer.client", "trainer.protocol", "trainer.data.scan",
              "trainer.data.cache", "trainer.data.batches", "trainer.flux.variants", "trainer.flux.lora",
              "trainer.memory.plan")  # fmt: skip


def imports(path: Path) -> list[str]:
    """Absolute dotted names of all that a module imports, relative imports resolved."""
    package, found = path.with_suffix("").parts[:-1], []
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found += [".".join([*base, a.name]) for a in node.names]
    return found


@pytest.mark.parametrize("path", TRAINER, ids=str)
def test_the_trainer_knows_nothing_of_comfyui(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"comfy", "comfy_api", "folder_paths", "server", "nodes", "execution"}


@pytest.mark.parametrize("path", [p for p in TRAINER if p.parts[1].removesuffix(".py") in ENGINE_PARTS], ids=str)
def test_the_engines_parts_know_nothing_of_runs(path):
    inner = {name.split(".")[1] for name in imports(path) if name.startswith("trainer.")}
    assert not inner & {"run", "saves", "live", "export", "worker", "client", "protocol", "loop", "cli", "data", "demo",
                        "events"}


@pytest.mark.parametrize("path", [p for p in TRAINER if p.parts[1] == "saves"], ids=str)
def test_what_a_run_keeps_knows_nothing_of_exports(path):
    assert not [name for name in imports(path) if name.startswith("trainer.export")]


@pytest.mark.parametrize("path", NODES, ids=str)
def test_nodes_use_only_the_trainers_doors(path):
    used = {name.removeprefix("trainer.") for name in imports(path) if name.startswith("trainer.")}
    strangers = [n for n in used if not any(n == door or n.startswith(door + ".") for door in FOR_NODES)]
    assert not strangers


@pytest.mark.parametrize("path", [p for p in NODES if not p.name.startswith("bridge")], ids=str)
def test_one_file_touches_comfyuis_internals(path):
    internals = [
        n for n in imports(path) if n.split(".")[0] in ("comfy", "folder_paths", "execution", "latent_preview")
    ]
    assert not internals


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_brings_no_torch(module):
    code = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch'; assert 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [*TRAINER, *NODES], ids=str)
def test_source_is_ascii(path):
    (ROOT / path).read_text(encoding="ascii")

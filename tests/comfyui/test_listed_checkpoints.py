"""A run's weights-only checkpoints are listed by ComfyUI's loaders, and a run that is gone does them no harm."""

import json
import subprocess
from pathlib import Path

import torch

from tests.comfyui.server import Install
from trainer.config import DatasetConfig, ModelConfig, RunConfig
from trainer.run import RunDirectory
from trainer.weights import entry, load_weights_

ROOT = Path(__file__).resolve().parents[2]
INSIDE = """
import json, os, shutil, sys
from pathlib import Path
pack, base = sys.argv[1:3]
sys.argv[1:] = ["--cpu", "--base-directory", base]
sys.path[:0] = [".", pack + "/tests/comfyui/inside"]
import comfy.options
comfy.options.enable_args_parsing()
import folder_paths
from given import load_pack
load_pack(pack)
from pack.nodes.bridge_checkpoints import list_checkpoints
from pack.trainer.run import RunDirectory

runs, told = Path(base) / "output" / "flux_fft", {}
def names(): return [n for n in folder_paths.get_filename_list("diffusion_models") if "step" in n]
def path(name): return folder_paths.get_full_path("diffusion_models", name)

list_checkpoints(RunDirectory(runs / "a"))
told["listed"] = names()
told["read"] = os.path.realpath(path(told["listed"][0]))
list_checkpoints(RunDirectory(runs / "a"))
told["again"] = names()
shutil.rmtree(runs / "a")
told["gone"] = [path(n) for n in names()]
list_checkpoints(RunDirectory(runs / "b"))
told["other"] = names()
os.rename(runs / "b", runs / "c")
list_checkpoints(RunDirectory(runs / "c"))
told["moved"] = [os.path.realpath(path(n)) for n in names()]

# Why the folder itself is not registered.
folder_paths.add_model_folder_path("diffusion_models", str(runs / "c" / "checkpoints"))
names()
shutil.rmtree(runs / "c")
try:
    names()
    told["registered"] = "listed"
except FileNotFoundError:
    told["registered"] = "FileNotFoundError"
print(json.dumps(told))
"""


def make(path: Path) -> None:
    path.mkdir(parents=True)
    config = RunConfig(name=path.name, model=ModelConfig(flux=str(path / "flux")), dataset=DatasetConfig(folder="-"))
    sample = {"image": "a.png", "latent": "a", "shape": [8, 8], "caption": "a"}
    manifest = {"format": 1, "cache": "cache", "samples": [sample], "empty_caption": "", "fingerprint": "f"}
    run = RunDirectory.create(path, config, manifest)
    run.write_checkpoint(500, [entry("weight", torch.ones(3, dtype=torch.bfloat16))], {})


def test_checkpoints_are_listed_and_runs_may_go(install: Install, tmp_path: Path) -> None:
    for kind in ("diffusion_models", "text_encoders"):
        (tmp_path / "models" / kind).mkdir(parents=True)
    runs = tmp_path / "output" / "flux_fft"
    for name in "ab":
        make(runs / name)
    done = subprocess.run([str(install.python), "-c", INSIDE, str(ROOT), str(tmp_path)], cwd=install.path,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["listed"] == told["again"] == ["flux_fft/a-step-000500.safetensors"]
    assert told["read"] == str(runs / "a" / "checkpoints" / "a-step-000500.safetensors")
    assert told["gone"] == [None]
    assert told["other"] == ["flux_fft/b-step-000500.safetensors"]
    assert told["moved"] == [str(runs / "c" / "checkpoints" / "b-step-000500.safetensors")]
    assert told["registered"] == "FileNotFoundError"
    assert not (tmp_path / "models" / "flux_fft").exists()


def test_what_is_listed_is_whole(tmp_path: Path) -> None:
    make(tmp_path / "a")
    module = torch.nn.Linear(1, 3, bias=False)
    module.weight = torch.nn.Parameter(torch.zeros(3))
    load_weights_(module, RunDirectory(tmp_path / "a").checkpoints()[0].path)
    assert torch.equal(module.weight, torch.ones(3))

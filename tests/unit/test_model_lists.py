"""Which models the canvas offers: ``nodes/bridge_files.py`` over a ``folder_paths`` of the test's own folders."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "nodes" / "bridge_files.py"


@pytest.fixture
def bridge_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    names = {"diffusion_models": ["a.ckpt", "b.safetensors", "sub/c.sft"], "checkpoints": ["b.safetensors", "d.pt"],
             "loras": ["x.pt", "y.safetensors"]}  # fmt: skip
    fake = types.ModuleType("folder_paths")
    vars(fake).update(
        get_filename_list=names.__getitem__,
        get_folder_paths=lambda kind: [str(tmp_path / "diffusers"), str(tmp_path / "nowhere")],
        get_full_path=lambda kind, name: str(tmp_path / kind / name) if name in names[kind] else None,
    )
    monkeypatch.setitem(sys.modules, "folder_paths", fake)
    spec = importlib.util.spec_from_file_location("bridge_files_under_test", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_what_can_be_read_comes_first_and_folders_are_named_once(bridge_files, tmp_path: Path) -> None:
    root = tmp_path / "diffusers"
    touch(root / "models--a--b/snapshots/0123/model_index.json")
    touch(root / "models--a--b/snapshots/0123/transformer/diffusion_pytorch_model.safetensors")
    touch(root / "alone/diffusion_pytorch_model-00001-of-00002.safetensors")
    touch(root / "notes/readme.txt")
    (root / "circle").symlink_to(root)
    assert bridge_files.flux_files() == [
        "b.safetensors", "sub/c.sft", "diffusers/alone", "diffusers/models--a--b/snapshots/0123", "a.ckpt", "d.pt",
    ]  # fmt: skip
    assert bridge_files.flux_path("diffusers/alone") == str(root / "alone")
    assert bridge_files.flux_path("d.pt") == str(tmp_path / "checkpoints" / "d.pt")
    for name in ("", "gone", "diffusers/../alone", "diffusers/notes"):
        with pytest.raises(ValueError, match="no such file in models/diffusion_models"):
            bridge_files.flux_path(name)
    assert bridge_files.lora_files() == ["y.safetensors", "x.pt"]

"""Exported files, looked into."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from trainer.export.extract import lora_name
from trainer.export.write import ExportOptions, export
from trainer.loop import Trainer
from trainer.run import RunDirectory


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def write(run: RunDirectory, path: Path, trainer: Trainer | None = None, **options) -> dict:
    return export(run, path, ExportOptions(**options), trainer=trainer)


def apply(parent: dict[str, torch.Tensor], lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parent with a LoRA merged, by the plain reading of its names."""
    made, used = {}, set()
    for name, value in parent.items():
        x, value = lora_name(name), value.float()
        key = f"{x}.diff_b" if name.endswith(".bias") else f"{x}.diff"
        if f"{x}.lora_up.weight" in lora and not name.endswith(".bias"):
            up, down, alpha = (lora[f"{x}.{k}"].float() for k in ("lora_up.weight", "lora_down.weight", "alpha"))
            value = value + float(alpha) / down.shape[0] * (up @ down)
            used |= {f"{x}.lora_up.weight", f"{x}.lora_down.weight", f"{x}.alpha"}
        elif key in lora:
            value = value + lora[key].float()
            used.add(key)
        made[name] = value
    assert used == set(lora)
    return made


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(sum((a[n].float() - b[n].float()).square().sum() for n in a)) ** 0.5

"""Plans for machines that are not here."""

import dataclasses

from trainer.config import (
    DatasetConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
)
from trainer.flux.model import FluxParams
from trainer.flux.variants import FileInfo
from trainer.memory import machine, plan

SQUARE = [(128, 128)]
DEV = dataclasses.asdict(FluxParams())


def info(params: dict = DEV) -> FileInfo:
    return FileInfo(path="flux.safetensors", kind="flux", trainable=True, variant="dev", dtype="bf16", flux=params)


def planned(
    vram: float, ram: float, *, memory: dict | None = None, optimizer: dict | None = None, **recipe
) -> plan.Plan:
    config = RunConfig(
        name="r",
        model=ModelConfig(flux="f"),
        dataset=DatasetConfig(folder="d"),
        optimizer=OptimizerConfig(**(optimizer or {})),
        recipe=RecipeConfig(**recipe),
        memory=MemoryConfig(**(memory or {})),
    )
    return plan.resolve(config, info(), SQUARE, machine.given(vram, ram))


def run_of(**recipe) -> RunConfig:
    return RunConfig(name="r", model=ModelConfig(flux="f"), dataset=DatasetConfig(folder="d"),
                     recipe=RecipeConfig(**recipe))  # fmt: skip

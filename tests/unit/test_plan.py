"""The plan's sizes against the real modules, and its decisions."""

import dataclasses

import pytest
import torch

from trainer.config import (
    STATE_FORMATS,
    WEIGHT_PRECISIONS,
    DatasetConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
)
from trainer.flux.model import TINY, FluxParams, build_meta
from trainer.flux.variants import FileInfo
from trainer.memory import plan
from trainer.optim.base import make_storage, spec_from_config

ADAN = {"kind": "adan", "betas": (0.98, 0.92, 0.99)}
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
    machine = plan.Machine("cuda:0", int(vram * plan.GIB), int(ram * plan.GIB))
    return plan.resolve(config, info(), SQUARE, machine)


@pytest.mark.parametrize("params", [FluxParams(), TINY, FluxParams(guidance_embed=False)])
def test_block_sizes_are_those_of_the_module(params):
    model = build_meta(params)
    sizes = {n: p.numel() for n, p in model.named_parameters()}

    def total(prefix):
        return sum(v for n, v in sizes.items() if n.startswith(prefix))

    double, single, rest = plan.block_sizes(dataclasses.asdict(params))
    blocks = params.depth * double + params.depth_single_blocks * single
    assert double == pytest.approx(total("double_blocks.0."), rel=0.02)
    assert single == pytest.approx(total("single_blocks.0."), rel=0.02)
    assert blocks + rest == pytest.approx(sum(sizes.values()), rel=0.02)


def test_flux_dev_has_its_published_size():
    assert sum(p.numel() for p in build_meta(FluxParams()).parameters()) == 11_901_408_320


@pytest.mark.parametrize("kind", [{}, ADAN])
@pytest.mark.parametrize("state_format", STATE_FORMATS)
@pytest.mark.parametrize("precision", WEIGHT_PRECISIONS)
def test_state_bytes_are_those_of_the_storage(kind, precision, state_format):
    config = OptimizerConfig(**kind, weight_precision=precision, state_format=state_format)
    dtype = torch.float32 if precision == "f32" else torch.bfloat16
    storage = make_storage(spec_from_config(config, 0), 1 << 20, dtype, "cpu")
    real = sum(t.numel() * t.element_size() for t in storage.values()) / (1 << 20)
    assert plan.state_bytes(config) == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"state_format": "f32"}, 10),
        ({"state_format": "f24"}, 8),
        ({}, 6 + 8 / 256),  # log16: a float32 scale for each block of 256, of each moment
        ({"state_format": "int8", "weight_precision": "stochastic"}, 2 + 8 / 256),
        ({**ADAN, "weight_precision": "stochastic"}, 8 + 12 / 256),
        (ADAN, 10 + 12 / 256),
    ],
)
def test_the_designs_bytes_per_parameter(settings, expected):
    assert plan.state_bytes(OptimizerConfig(**settings)) == pytest.approx(expected)


def test_more_vram_never_swaps_more():
    swaps = [planned(vram, 256).blocks_to_swap for vram in (16, 20, 24, 32, 48, 80)]
    assert swaps == sorted(swaps, reverse=True) and swaps[-1] == 0


def test_a_large_card_keeps_all_and_a_small_one_says_what_to_do():
    large = planned(80, 256)
    assert large.fits and large.blocks_to_swap == 0 and not large.activation_offload
    small = planned(6, 256)
    assert not small.fits and "micro_batch" in small.reasons[0]
    assert planned(32, 256).fits and planned(24, 256).fits


def test_too_little_ram_is_said():
    poor = planned(32, 64)
    assert not poor.fits and "GiB of RAM" in poor.reasons[-1] and poor.ram_gb > 64


def test_what_the_user_sets_is_kept():
    chosen = planned(80, 256, memory={"blocks_to_swap": 30, "activation_offload": "on", "micro_batch": 1})
    assert (chosen.blocks_to_swap, chosen.activation_offload, chosen.micro_batch) == (30, True, 1)
    assert planned(80, 256, memory={"blocks_to_swap": 999}).blocks_to_swap == 57


def test_the_plan_keeps_within_what_it_was_given():
    for vram in (24, 32, 48):
        assert planned(vram, 256).vram_gb <= vram


def test_micro_batches_and_small_batches_take_less():
    assert planned(80, 256, memory={"micro_batch": 1}).vram_gb < planned(80, 256).vram_gb
    assert planned(80, 256, batch_size=1).vram_gb < planned(80, 256).vram_gb


def test_a_missing_gpu_is_named():
    if torch.cuda.is_available():
        index = torch.cuda.device_count()
        with pytest.raises(ValueError, match=f"cuda:{index}"):
            plan.this_machine(f"cuda:{index}", 0)
    else:
        with pytest.raises(ValueError, match="no GPU here"):
            plan.this_machine("cuda", 0)
        assert plan.this_machine("auto", 0).device == "cpu"


def test_json_gives_the_plan_back():
    p = planned(32, 256)
    assert plan.from_dict(plan.to_dict(p)) == p

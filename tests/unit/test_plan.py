"""The plan's decisions: its reference points, what it says would fit, RAM, VRAM and disk."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from plans import DEV, SQUARE, info, planned, run_of
from states import ADAN

from trainer.config import (
    DatasetConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from trainer.memory import disk, footprint, machine, plan

REFERENCE = [  # VRAM, RAM, batch, optimizer, whether it fits
    (32, 128, 5, {"state_format": "f24"}, True),
    (32, 128, 5, {}, True),
    (32, 128, 5, {**ADAN, "weight_precision": "stochastic"}, True),
    (32, 128, 5, ADAN, False),
    (32, 64, 5, {"state_format": "int8", "weight_precision": "stochastic"}, True),
    (32, 64, 5, {}, False),
    (24, 128, 5, {}, True),
    (24, 64, 1, {"state_format": "int8", "weight_precision": "stochastic"}, True),
]


@pytest.mark.parametrize("vram, ram, batch, optimizer, fits", REFERENCE)
def test_the_reference_points(vram, ram, batch, optimizer, fits):
    assert planned(vram, ram, optimizer=optimizer, batch_size=batch).fits is fits
    assert planned(80, 200, optimizer=optimizer, batch_size=batch).fits


def test_a_small_card_offloads_activations():
    small = planned(24, 128)
    assert small.fits and small.activation_offload and small.vram_gb <= 23


def test_more_vram_never_swaps_more():
    swaps = [planned(vram, 256).blocks_to_swap for vram in (16, 20, 24, 32, 48, 80)]
    assert swaps == sorted(swaps, reverse=True) and swaps[-1] == 0


def test_swapping_more_never_takes_more_vram():
    stages = footprint.stage_sizes(DEV, OptimizerConfig())
    for offload in (False, True):
        sizes = [
            footprint.footprint(stages, swap=swap, offload=offload, on_gpu=True, pictures=5, micro=5, tokens=4608,
                                hidden=3072, compute=2).vram
            for swap in range(58)
        ]  # fmt: skip
        totals = [sum(size.values()) for size in sizes]
        assert totals == sorted(totals, reverse=True)


def test_a_large_card_keeps_all_and_a_small_one_says_what_to_do():
    large = planned(80, 256)
    assert large.fits and large.blocks_to_swap == 0 and not large.activation_offload
    small = planned(16, 256)
    assert not small.fits and small.blocks_to_swap == 57 and "micro_batch 1" in small.reasons[-1]
    assert planned(16, 256, memory={"micro_batch": 1}).fits
    assert "no setting" in planned(4, 256).reasons[-1]


def test_too_little_ram_is_said_with_what_would_fit_the_best_first():
    poor = planned(32, 128, optimizer=ADAN)
    assert "GiB of RAM" in poor.reasons[1] and poor.ram_gb > 128
    assert "log16 with weight_precision stochastic" in poor.reasons[2]
    assert "int8 with weight_precision split" in poor.reasons[3]
    poorer = planned(32, 64)
    assert "int8 with weight_precision stochastic" in poorer.reasons[-1]


def test_what_is_said_to_fit_does():
    for vram, ram, optimizer in ((32, 64, {}), (12, 64, {}), (32, 100, ADAN), (16, 48, {})):
        told = planned(vram, ram, optimizer=optimizer).reasons
        for changed in told:
            if "would fit" not in changed:
                continue
            words, settings, recipe, memory = changed.split(), dict(optimizer), {}, {}
            if "NAdam" in changed:
                settings = {}
            if "state_format" in words:
                settings["state_format"] = words[words.index("state_format") + 1]
                settings["weight_precision"] = words[words.index("weight_precision") + 1].strip(",")
            if "batch_size 1" in changed:
                recipe["batch_size"] = 1
            if "micro_batch 1" in changed:
                memory["micro_batch"] = 1
            if "half the resolution" not in changed:
                assert planned(vram, ram, optimizer=settings, memory=memory, **recipe).fits, changed


def test_spare_vram_and_ram_settle_where_activations_wait():
    assert not planned(32, 128, optimizer={"state_format": "f24"}).activation_offload  # no RAM to spare
    assert planned(32, 256, optimizer={"state_format": "f24"}).activation_offload


def test_what_the_user_sets_is_kept():
    chosen = planned(80, 256, memory={"blocks_to_swap": 30, "activation_offload": "on", "micro_batch": 1})
    assert (chosen.blocks_to_swap, chosen.activation_offload, chosen.micro_batch) == (30, True, 1)
    assert planned(80, 256, memory={"blocks_to_swap": 999}).blocks_to_swap == 57


def test_items_add_up():
    found = planned(24, 128)
    vram = sum(v for k, v in found.items.items() if k.startswith("GPU: ") and "left to" not in k)
    ram = sum(v for k, v in found.items.items() if not k.startswith(("GPU: ", "disk: ", "left to")))
    disk = sum(v for k, v in found.items.items() if k.startswith("disk: "))
    assert vram == pytest.approx(found.vram_gb, abs=0.02) and ram == pytest.approx(found.ram_gb, abs=0.02)
    assert disk == pytest.approx(found.disk_gb, abs=0.02) and found.pinned_gb < found.ram_gb


def test_what_cannot_be_pinned_is_told():
    config = RunConfig(name="r", model=ModelConfig(flux="f"), dataset=DatasetConfig(folder="d"))
    found = plan.resolve(config, info(), SQUARE, machine.given(32, 128, windows=True))
    assert found.fits and found.pinned_gb == pytest.approx(51.2, abs=0.1) and "51 of 101 GiB" in found.reasons[-1]


def test_the_plan_keeps_within_what_it_was_given():
    for vram in (24, 32, 48):
        assert planned(vram, 256).vram_gb <= vram - 1


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


def test_free_memory_counts_the_container(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_cgroups", lambda: [(1 << 30, 1 << 29)])
    assert machine.total_ram() == 1 << 30 and machine.free_ram() == 1 << 29


def test_json_gives_the_plan_back():
    p = planned(32, 256)
    assert plan.from_dict(plan.to_dict(p)) == p


def test_an_average_takes_two_bytes_more_for_every_parameter_and_is_what_is_given_up_first():
    plain, kept = planned(32, 160), planned(32, 160, ema_decay=0.999)
    assert kept.fits and kept.items["average of the weights"] == pytest.approx(2.016 * 11.9e9 / 2**30, rel=0.01)
    assert kept.disk_gb - plain.disk_gb == pytest.approx(2 * kept.items["average of the weights"], abs=0.1)
    poor = planned(32, 116, ema_decay=0.999)
    assert not poor.fits and "no average of the weights" in next(r for r in poor.reasons if "would fit" in r)
    assert planned(32, 116).fits and planned(32, 128, ema_decay=0.999).fits
    poorer = planned(32, 64, ema_decay=0.999)
    told = [r for r in poorer.reasons if "would fit" in r]
    assert "int8 with weight_precision stochastic" in told[0] and "no average" in told[0]
    assert plan.key(run_of(ema_decay=0.9), SQUARE, "cpu") != plan.key(run_of(), SQUARE, "cpu")


def test_the_disk_is_counted_as_the_settings_fill_it():
    def takes(**recipe) -> dict[str, float]:
        found = planned(32, 128, **recipe).items
        return {name.removeprefix("disk: "): size for name, size in found.items() if name.startswith("disk: ")}

    two, four = takes(), takes(keep_save_points=3)
    assert four["4 save points"] == pytest.approx(2 * two["2 save points"], rel=1e-3)
    assert two["an export"] == pytest.approx(22.17, abs=0.05) and not [n for n in two if "checkpoint" in n]
    few = takes(checkpoint_every_steps=100, keep_checkpoints=2)
    assert few["3 checkpoints"] == pytest.approx(3 * two["an export"], rel=1e-3)
    assert takes(checkpoint_every_steps=100)["1 checkpoint, of each"] == pytest.approx(two["an export"], rel=1e-3)
    assert "all are kept" in planned(32, 128, checkpoint_every_steps=100).reasons[-1]


def test_a_disk_that_is_too_small_is_told_and_does_not_keep_from_training(tmp_path, monkeypatch):
    here = dataclasses.replace(machine.given(32, 128), disk_free=210 << 30)
    assert not [r for r in plan.resolve(run_of(), info(), SQUARE, here).reasons if "disk" in r]
    full = dataclasses.replace(here, disk_free=100 << 30)
    found = plan.resolve(run_of(), info(), SQUARE, full)
    (told,) = [r for r in found.reasons if "disk" in r]
    assert found.fits and "room for 100.0 GiB" in told and f"{found.disk_gb:.1f} GiB" in told
    free = disk.room(tmp_path / "not" / "yet")
    assert free is not None and free > 0
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "old").write_bytes(b"x" * 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=500))
    assert disk.room(tmp_path) == 1500  # what is there makes way

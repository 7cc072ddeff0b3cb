"""The benchmark of a step: its fields, its floor, and that it runs on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch
from fake_streams import FakeStreams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import step as bench

TINY = ["--preset", "tiny", "--batch", "2", "--resolution", "64", "--text-tokens", "8", "--device", "cpu"]


def measured(capsys, *arguments: str) -> dict:
    assert bench.main([*TINY, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_cpu_run_has_every_field(capsys):
    found = measured(capsys, "--steps", "3", "--swap", "1", "--baseline", "blocking")
    assert len(found["steps"]) == 3
    for name in ("seconds", "tflops", "waited_seconds", "gb_up", "gb_down", "peak_vram_gb", "peak_rss_gb"):
        assert all(name in one for one in found["steps"])
    assert found["floor_seconds"] == pytest.approx(found["forward_seconds"] + found["backward_seconds"])
    assert found["ratio_to_arithmetic"] == pytest.approx(found["step_seconds"] / found["arithmetic_seconds"])
    assert found["gb_down"] > 0 and found["blocks_to_swap"] == 1 and found["gain_over_blocking"] > 0


@pytest.mark.parametrize("optimizer", ["nadam", "adan"])
def test_settings_reach_the_engine(capsys, optimizer):
    found = measured(capsys, "--steps", "1", "--optimizer", optimizer, "--state-format", "int8",
                     "--weight-precision", "stochastic")  # fmt: skip
    assert (found["optimizer"], found["state_format"], found["weight_precision"]) == (optimizer, "int8", "stochastic")


def test_the_floor_takes_the_slower_of_arithmetic_and_copies():
    alone, speeds = {"forward": 2.0, "backward": 6.0}, {"h2d_both": 10.0, "d2h_both": 20.0}
    little = {"up_forward": 5.0, "up_backward": 10.0, "down_backward": 10.0}
    assert bench.floor(alone, little, speeds) == 8.0
    assert bench.floor(alone, {**little, "up_forward": 50.0}, speeds) == 5.0 + 6.0
    assert bench.floor(alone, {**little, "up_backward": 90.0}, speeds) == 2.0 + 9.0
    assert bench.floor(alone, {**little, "down_backward": 200.0}, speeds) == 2.0 + 10.0
    assert bench.floor(alone, little, {}) == 8.0


@pytest.mark.parametrize("streams", [lambda: None, FakeStreams], ids=["cpu", "fake"])
def test_measuring_the_arithmetic_leaves_the_run_as_it_was(tmp_path, streams):
    def make():
        return bench.random_run(
            "tiny", tmp_path, resolution=64, text_tokens=8, optimizer=bench.OptimizerConfig(),
            recipe=bench.RecipeConfig(batch_size=2), streams=streams(),
            memory=bench.MemoryConfig(device="cpu", blocks_to_swap=1, activation_offload="on"),
        )  # fmt: skip

    plain, watched = make(), make()
    for whole in (True, False):
        spent = bench.arithmetic(watched, block_by_block=whole)
        assert spent["forward"] > 0 and spent["backward"] > 0
    assert [s.arena.resident for s in watched.stages] == [s.arena.resident for s in plain.stages]
    for trainer in (plain, watched):
        trainer.train_step()
        trainer.conveyor.streams.synchronize()
    for a, b in zip(plain.stages, watched.stages, strict=True):
        for one, two in zip(a.arena.groups, b.arena.groups, strict=True):
            assert torch.equal(one.current, two.current)


def test_presets_have_the_sizes_of_the_issue():
    small = bench.PRESETS["0.3b"]
    assert (small.hidden_size, small.num_heads, small.depth, small.depth_single_blocks) == (1536, 12, 2, 4)
    assert bench.PRESETS["flux-dev"] == type(small)() and bench.PRESETS["tiny"].hidden_size == 128

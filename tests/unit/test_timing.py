"""The event model of a step against schedules worked out by hand."""

import dataclasses

import pytest

from trainer.config import OptimizerConfig
from trainer.flux.model import FluxParams
from trainer.memory import timing
from trainer.memory.footprint import GroupSize, Stages, StageSize, stage_sizes
from trainer.memory.machine import Speeds
from trainer.memory.streams import COMPUTE, DOWN, UP
from trainer.memory.timing import Operation, StepWork, schedule, simulate

DEV = dataclasses.asdict(FluxParams())


def test_a_stream_runs_in_order():
    found = schedule([Operation(COMPUTE, 2.0), Operation(COMPUTE, 3.0), Operation(UP, 1.0)])
    assert found.ends == (2.0, 5.0, 1.0) and found.waited == {UP: 0.0, DOWN: 0.0}


def test_copies_hide_behind_arithmetic():
    """Block 2's weights (3 s) come while block 1 is computed (4 s); the first block's cannot be hidden."""
    found = schedule([
        Operation(UP, 3.0),               # 0: weights of block 1, until 3
        Operation(COMPUTE, 4.0, (0,)),    # 1: 3 to 7
        Operation(UP, 3.0),               # 2: weights of block 2, 3 to 6
        Operation(COMPUTE, 4.0, (2,)),    # 3: 7 to 11
        Operation(DOWN, 2.0, (1,)),       # 4: 7 to 9
    ])  # fmt: skip
    assert found.ends == (3.0, 7.0, 6.0, 11.0, 9.0)
    assert found.waited == {UP: 3.0, DOWN: 0.0}


def test_a_slot_that_is_not_free_holds_the_copy_and_the_arithmetic():
    """One slot: the weights of block 2 wait for block 1's to have gone home."""
    found = schedule([
        Operation(UP, 1.0),               # 0: 0 to 1
        Operation(COMPUTE, 1.0, (0,)),    # 1: 1 to 2
        Operation(DOWN, 5.0, (1,)),       # 2: 2 to 7
        Operation(UP, 1.0, (2,)),         # 3: 7 to 8
        Operation(COMPUTE, 1.0, (3,)),    # 4: 8 to 9
        Operation(COMPUTE, 1.0, (2,)),    # 5: 9 to 10
    ])  # fmt: skip
    assert found.ends == (1.0, 2.0, 7.0, 8.0, 9.0, 10.0)
    assert found.waited == {UP: 1.0 + 6.0, DOWN: 0.0}


def small(
    weight: int, states: int, swap: int, forward: float, backward: float, kept: int = 0, blocks: int = 4
) -> StepWork:
    """A model whose every stage is alike, in bytes and operations."""
    stage = StageSize("single", (GroupSize("w", weight, weight, (("exp_avg", states),) if states else ()),))
    ends = [dataclasses.replace(stage, kind=k, groups=(GroupSize("e", 1, 0, ()),)) for k in ("embed", "head")]
    stages = Stages([ends[0], *[stage] * blocks, ends[1]])
    middle = (0.0, *[forward] * blocks, 0.0), (0.0, *[backward] * blocks, 0.0)
    return StepWork(stages, swap, *middle, kept)


def test_all_resident_is_pure_arithmetic():
    pace = simulate(small(100, 0, 0, 1e12, 3e12), Speeds(tflops=1, h2d=1, d2h=1))
    assert pace.seconds == pace.arithmetic == 16.0 and pace.waits_for == "arithmetic"


def test_copies_that_fit_behind_the_arithmetic_cost_nothing():
    """4 swapped blocks of 1 s forward, 3 s backward; their weights take 0.5 s a way."""
    pace = simulate(small(int(0.5e9), 0, 4, 1e12, 3e12), Speeds(tflops=1, h2d=1, d2h=1))
    assert pace.seconds == pytest.approx(16.0) and pace.waits_for == "arithmetic"


def test_slow_copies_set_the_pace():
    """4 swapped blocks, 2 slots: of 8 visits 4 find their weights there; 4 copies of 10 s and next to no arithmetic."""
    pace = simulate(small(int(10e9), 0, 4, 1e9, 1e9), Speeds(tflops=1, h2d=1, d2h=100))
    assert pace.seconds == pytest.approx(40.0, rel=0.02) and pace.waits_for == "up"


def test_states_that_come_slowly_set_the_pace():
    """4 blocks with 10 s of states each way, in pieces of 0.6 s, both ways at once: 40 s, and the last piece's way."""
    work = small(1 << 30, int(10e9), 0, 1e9, 1e9)
    pace = simulate(work, Speeds(tflops=1, h2d=1, d2h=1))
    assert pace.seconds == pytest.approx(40.0, abs=1.5) and pace.waits_for in ("up", "down")


def test_a_piece_as_large_as_the_slots_goes_up_and_down_in_turn():
    pace = simulate(small(1 << 20, int(10e9), 0, 1e9, 1e9), Speeds(tflops=1, h2d=1, d2h=1))
    assert pace.seconds == pytest.approx(80.0, rel=0.001)


def test_memory_that_both_ways_share_is_named():
    fast = Speeds(tflops=1, h2d=1, d2h=1)
    work = small(1 << 20, int(1e9), 0, 1e9, 1e9)
    slow = simulate(work, dataclasses.replace(fast, dram=0.5))
    assert slow.waits_for == "memory" and slow.seconds > 2 * simulate(work, fast).seconds


def test_kept_inputs_travel_both_ways():
    fast, slow = Speeds(tflops=1, h2d=1, d2h=1), Speeds(tflops=1, h2d=0.1, d2h=0.1)
    work = small(1 << 20, 0, 0, 1e12, 3e12, kept=int(0.5e9))
    assert simulate(work, fast).seconds == pytest.approx(16.0, rel=0.01)
    assert simulate(work, slow).seconds > 30


def test_the_work_of_flux_dev_is_the_published_one():
    """1,524 TFLOP for 5 pictures of 4,608 tokens, all recomputed (59.5 and 14.9 TFLOP of a forward pass)."""
    stages = stage_sizes(DEV, OptimizerConfig())
    work = timing.step_work(DEV, stages, swap=0, offload=False, pictures=5, tokens=4608)
    assert sum(work.forward) / 5 == pytest.approx(74.4e12, rel=0.01)
    assert sum(work.forward) + sum(work.backward) == pytest.approx(1524e12, rel=0.01)


def test_more_of_anything_is_never_slower():
    stages = stage_sizes(DEV, OptimizerConfig())
    work = timing.step_work(DEV, stages, swap=57, offload=True, pictures=5, tokens=4608)
    base = Speeds(tflops=157, h2d=10, d2h=10, dram=30)
    slow = simulate(work, base).seconds
    for name in ("tflops", "h2d", "d2h", "dram"):
        assert simulate(work, dataclasses.replace(base, **{name: 3 * getattr(base, name)})).seconds <= slow + 1e-9

"""Spikes of the loss: told where it jumps, silent where it is only noisy."""

import math
import random

import pytest

from trainer.spikes import FEWEST, LEAST, QUIET, RISEN, risen, spikes, usual


def noisy(count: int, spread: float, seed: int, *, first: float = 2.0, last: float = 0.5) -> list[float]:
    """A loss that falls from ``first`` to ``last`` under log-normal noise."""
    draw = random.Random(seed)
    return [first * (last / first) ** (i / count) * math.exp(draw.gauss(0, spread)) for i in range(count)]


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_any_width_that_losses_have_is_no_spike(spread, seed):
    assert spikes(noisy(1500, spread, seed)) == []


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("at", [FEWEST, 100, 999])
def test_a_jump_to_ten_times_the_usual_is_told_once(spread, at):
    losses = noisy(1000, spread, 3)
    base = sorted(losses[max(0, at - 50) : at])[len(losses[max(0, at - 50) : at]) // 2]
    losses[at] = 10.5 * base
    assert spikes(losses) == [at]
    told = usual(losses[:at], losses[at])
    assert told is not None and 0.8 * base <= told <= 1.25 * base


def test_a_loss_that_stays_high_is_told_once_and_then_is_what_is_usual():
    losses = [1.0] * 100 + [12.0] * 200
    told = spikes(losses)
    assert told[0] == 100 and told == [100, 100 + QUIET + 1]
    assert usual(losses[:200], 12.0) is None


def test_spikes_among_the_recent_losses_hide_no_other():
    losses = [1.0, 1.1, 0.9] * 20
    for at in (20, 30, 40, 50):
        losses[at] = 15.0
    assert usual(losses, 12.0) == pytest.approx(1.0, abs=0.11)


def test_too_few_losses_or_ones_that_are_no_numbers_tell_nothing():
    assert usual([1.0] * (FEWEST - 1), 100.0) is None
    assert usual([1.0] * FEWEST, 100.0) == 1.0
    assert usual([None, math.nan, 0.0, math.inf] * 20, 100.0) is None  # type: ignore[list-item]
    assert usual([1.0] * 50, math.nan) is None and usual([1.0] * 50, 0.0) is None
    assert usual([1.0] * 50, LEAST * 0.99) is None and usual([1.0] * 50, LEAST * 1.01) == 1.0


@pytest.mark.parametrize("first, last, times", [
    ([0.4] * 20, [1.6] * 20, 4.0),
    ([0.4] * 20, [0.4 * RISEN * 0.99] * 20, None),  # a hard subject
    ([0.4] * 20, [0.3] * 17 + [9.0] * 3, None),  # a few of the last are spikes
    ([2.0] * 20, [0.1] * 20, None),
    ([0.4] * (FEWEST - 1), [4.0] * 20, None),
    ([0.4] * 20, [4.0] * FEWEST + [math.nan, None], 10.0),
    ([0.0] * 20, [4.0] * 20, None),
])  # fmt: skip
def test_a_loss_that_has_gone_up_for_good_is_told_from_noise(first, last, times):
    assert risen(first, last) == (pytest.approx(times) if times else None)


def test_losses_of_a_flux_differ_by_less_from_step_to_step():
    # At batch 1 the noise level alone spreads the loss of one picture by factors of three (log-normal here).
    draw = random.Random(3)
    losses = [0.5 * math.exp(draw.gauss(0.0, 0.6)) for _ in range(40)]
    assert all(risen(losses[:20], losses[i : i + 20]) is None for i in range(20))

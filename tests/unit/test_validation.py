"""Validation and the fixed evaluation: measured alike whenever, and changing nothing."""

import math
from dataclasses import replace
from unittest.mock import ANY

import pytest
from states import assert_same, contents

from trainer import flow
from trainer.loop import Trainer


def with_validation(manifest: dict, count: int) -> dict:
    return {**manifest, "validation": manifest["samples"][:count]}


def test_validation_repeats_bit_for_bit_and_knows_nothing_of_batches(tiny):
    config, folder, manifest = tiny()
    plain = Trainer(config, folder, dataset=manifest)
    assert plain.validate() is None
    trainer = Trainer(config, folder, dataset=with_validation(manifest, 7))
    before = contents(trainer)
    first = trainer.validate()
    assert first == trainer.validate() and math.isfinite(first)
    assert_same(before, contents(trainer))
    assert trainer.train_step() == replace(plain.train_step(), seconds=ANY)
    assert trainer.validate() != first
    single = replace(config, recipe=replace(config.recipe, batch_size=1))
    swapped = replace(single, memory=replace(config.memory, blocks_to_swap=2))
    assert Trainer(swapped, folder, dataset=with_validation(manifest, 7)).validate() == first


def test_validation_is_that_of_the_pictures_held_out(tiny):
    config, folder, manifest = tiny()
    some, others = (Trainer(config, folder, dataset={**manifest, "validation": manifest["samples"][part]})
                    for part in (slice(0, 2), slice(2, 4)))  # fmt: skip
    assert some.validate() != others.validate()


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 15, 16, 63, 64, 65, 1000])
def test_what_is_measured_is_bounded_and_spread(samples):
    pairs = flow.fixed_evaluations(samples, 64)
    assert len(pairs) == len(set(pairs)) == min(64, 16 * samples)
    assert pairs == flow.fixed_evaluations(samples, 64)
    seen = [i for i, _ in pairs]
    counts = [seen.count(i) for i in range(samples)] if samples <= 64 else [1]
    assert max(counts) - min(counts) <= 1 and max(seen) < samples
    gaps = [b - a for a, b in zip(sorted(set(seen)), sorted(set(seen))[1:], strict=False)]
    assert not gaps or max(gaps) <= -(-samples // 64)
    levels = [at for _, at in pairs]
    if samples >= 64:  # neighbours, which are often alike, are measured at levels far from each other
        assert all(5 <= abs(a - b) <= 11 for a, b in zip(levels, levels[1:], strict=False))
    assert {levels.count(at) for at in range(16)} <= ({4} if samples in (16, 64, 65, 1000) else {1, 2, 3, 4, 5})

"""Masks, weights, mirrored pictures, several captions and repeats in the step itself."""

import dataclasses

import pytest
import torch

from trainer.data.cache import Cache
from trainer.loop import Trainer


def with_extras(folder, manifest, *, mask=None, weight=None, flipped=False, captions=0, repeats=1):
    cache, g = Cache(folder / "cache"), torch.Generator().manual_seed(5)
    samples = []
    for i, sample in enumerate(manifest["samples"]):
        sample = dict(sample)
        height, width = sample["shape"]
        if mask is not None:
            cache.write("masks", f"mask{i}", torch.full((height, width), mask[i % len(mask)]))
            sample["mask"] = f"mask{i}"
        if weight is not None:
            sample["weight"] = weight
        if flipped:
            cache.write("latents", f"flipped{i}", torch.randn(16, height, width, generator=g))
            sample["flipped"] = f"flipped{i}"
        if captions:
            keys = [sample["caption"]]
            for n in range(1, captions):
                keys.append(f"caption{i}-{n}")
                context, pooled = cache.read("captions", sample["caption"]) or pytest.fail("no caption")
                cache.write("captions", keys[-1], context + n, pooled - n)
            sample["captions"] = keys
        if repeats > 1:
            sample["repeats"] = repeats
        samples.append(sample)
    return {**manifest, "samples": samples}


def losses(config, folder, manifest, steps=3):
    trainer = Trainer(config, folder, dataset=manifest)
    found = [trainer.train_step() for _ in range(steps)]
    return [r.loss for r in found], found, trainer


def test_weights_and_masks_scale_the_loss(tiny):
    config, folder, manifest = tiny(optimizer={"lr": 0.0})
    plain, _, _ = losses(config, folder, manifest)
    assert losses(config, folder, with_extras(folder, manifest, mask=[1.0]))[0] == plain, "a white mask changes no bit"
    twice, _, _ = losses(config, folder, with_extras(folder, manifest, weight=2.0))
    assert twice == pytest.approx([2 * loss for loss in plain], rel=1e-6)
    half, _, _ = losses(config, folder, with_extras(folder, manifest, mask=[0.5], weight=2.0))
    assert half == pytest.approx(plain, rel=1e-6)
    assert losses(config, folder, with_extras(folder, manifest, mask=[0.0]))[0] == [0.0] * 3


@pytest.mark.parametrize("mask", [0.0, 1.0])
def test_what_is_masked_teaches_nothing(tiny, mask):
    config, folder, manifest = tiny(recipe={"batch_size": 7})
    trainer = Trainer(config, folder, dataset=with_extras(folder, manifest, mask=[mask]))
    before = [p.detach().clone() for s in trainer.stages for p in s.arena.parameters]
    trainer.train_step()
    after = [p.detach() for s in trainer.stages for p in s.arena.parameters]
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert any(moved) == (mask > 0)


@pytest.mark.parametrize("micro", [1, 2])
def test_micro_batches_see_the_same_examples(tiny, micro):
    config, folder, manifest = tiny(shapes=[(8, 8)] * 6)
    extras = with_extras(folder, manifest, mask=[1.0, 0.25, 0.0], weight=0.5, flipped=True, captions=3)
    whole, _, _ = losses(config, folder, extras)
    parts = dataclasses.replace(config, memory=dataclasses.replace(config.memory, micro_batch=micro))
    assert losses(parts, folder, extras)[0] == pytest.approx(whole, rel=1e-5)


def test_choices_change_the_loss_and_repeat_with_the_seed(tiny):
    config, folder, manifest = tiny(optimizer={"lr": 0.0}, shapes=[(8, 8)] * 4, recipe={"batch_size": 4})
    plain, _, _ = losses(config, folder, manifest, 6)
    for extras in ({"flipped": True}, {"captions": 3}):
        changed, _, _ = losses(config, folder, with_extras(folder, manifest, **extras), 6)
        assert changed != plain
        assert losses(config, folder, with_extras(folder, manifest, **extras), 6)[0] == changed


def test_a_picture_twice_in_a_batch_has_two_noises(tiny):
    config, folder, manifest = tiny(shapes=[(8, 8)], recipe={"batch_size": 3})
    _, reports, _ = losses(config, folder, with_extras(folder, manifest, repeats=6), 2)
    for report in reports:
        assert report.samples == (0, 0, 0) and len(set(report.timesteps)) == 3


def test_the_recipes_rate_and_dropout_reach_the_step(tiny):
    config, folder, manifest = tiny(recipe={"warmup_steps": 4, "caption_dropout": 1.0})
    trainer = Trainer(config, folder, dataset=manifest)
    assert [trainer.train_step().lr for _ in range(2)] == [2.5e-4, 5e-4]
    (micro,) = trainer._micro_batches([0, 1], [0.5, 0.5], [(0,), (1,)])
    empty, _ = trainer.data.empty_caption()
    assert torch.equal(micro.context, empty.to(micro.context.dtype).expand_as(micro.context))

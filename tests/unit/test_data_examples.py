"""From a folder to the loss: what each setting of a dataset does in the end."""

import json

import numpy as np
import pytest
import torch
from block_means import Encoders
from PIL import Image

from trainer.config import DatasetConfig, RecipeConfig
from trainer.data.batches import Dataset
from trainer.data.cache import Cache, prepare
from trainer.data.manifest import changes, entries
from trainer.data.scan import scan_folder
from trainer.flow import sample_losses

COUNTERS = [(seed, 0, step, 0) for seed in range(2) for step in range(1, 101)]


@pytest.fixture
def folder(tmp_path):
    """One picture, 128 x 64: the left half red, the right half blue, the upper half of it all darker."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = np.zeros((64, 128, 3), dtype=np.uint8)
    pixels[:, :64, 0] = pixels[:, 64:, 2] = 200
    pixels[:32] //= 2
    Image.fromarray(pixels).save(folder / "a.png")
    (folder / "a.txt").write_text("a, b, c, d", encoding="utf-8")
    return folder


def made(folder, tmp_path, encoders=None, **settings):
    config = DatasetConfig(**{"folder": str(folder), "resolution": 96, "bucket_step": 16, **settings})
    encoders = encoders or Encoders()
    manifest = prepare(
        scan_folder(config), config, Cache(tmp_path / "cache"), encode_images=encoders.encode_images,
        encode_captions=encoders.encode_captions, vae_id="v", text_id="t", token_length=12, run_dir=tmp_path / "run")
    data = Dataset(json.loads(json.dumps(manifest)), tmp_path / "run")
    (tmp_path / "run").mkdir(exist_ok=True)
    return data, manifest, encoders


def text_of(pooled):
    return "".join(chr(int(code)) for code in pooled)


def seen(data, train=True, dropout=0.0):
    return [data.examples([0], [c], dropout, train=train) for c in COUNTERS]


def test_without_choices_an_example_is_what_is_cached(folder, tmp_path):
    data, manifest, _ = made(folder, tmp_path)
    assert set(manifest["samples"][0]) == {"image", "latent", "shape", "caption"}
    assert set(manifest) == {"format", "cache", "samples", "empty_caption", "fingerprint"}
    for train in (True, False):
        example = data.examples([0, 0], COUNTERS[:2], 0.0, train=train)
        context, pooled = data.captions([0, 0], [False, False])
        assert torch.equal(example.latents, data.latents([0, 0])) and example.latents.dtype == torch.float32
        assert torch.equal(example.context, context) and torch.equal(example.pooled, pooled)
        assert example.weight is None
    assert data.validation is None and data.repeats is None


def test_mirrored_half_of_the_time(folder, tmp_path):
    data, manifest, encoders = made(folder, tmp_path, flip=True)
    assert encoders.images == 2 and manifest["samples"][0]["flipped"] != manifest["samples"][0]["latent"]
    upright = data.latents([0])
    mirrored = upright.flip(-1)
    assert not torch.equal(upright, mirrored)
    found = [torch.equal(e.latents, mirrored) for e in seen(data)]
    assert all(torch.equal(e.latents, mirrored if m else upright) for e, m in zip(seen(data), found, strict=True))
    assert 70 < sum(found) < 130
    assert all(torch.equal(e.latents, upright) for e in seen(data, train=False))


def test_one_of_several_captions_at_a_time(folder, tmp_path):
    data, manifest, encoders = made(folder, tmp_path, shuffle_tags=True, caption_variants=3)
    assert len(encoders.texts) == 4 and len(manifest["samples"][0]["captions"]) == 3
    found = [text_of(e.pooled[0]) for e in seen(data)]
    assert len(set(found)) == len({t[:5] for t in encoders.texts if t}) > 1
    assert all(sorted(t[:12]) for t in found)
    first = {text_of(e.pooled[0]) for e in seen(data, train=False)}
    assert len(first) == 1 and min(found.count(t) for t in set(found)) > 30
    # The same at the next start, whatever the training's seed: nothing is encoded again.
    again, same, encoders = made(folder, tmp_path, shuffle_tags=True, caption_variants=3)
    assert same == manifest and encoders.texts == []


def test_lines_at_random(folder, tmp_path):
    (folder / "a.txt").write_text("one\ntwo\nthree", encoding="utf-8")
    data, _, _ = made(folder, tmp_path, caption_lines="random", caption_variants=1)
    assert {text_of(e.pooled[0]).strip() for e in seen(data)} == {"one", "two", "three"}
    data, _, _ = made(folder, tmp_path)
    assert {text_of(e.pooled[0]) for e in seen(data)} == {"one t"}


def test_dropout_takes_the_cached_empty_caption(folder, tmp_path):
    data, _, _ = made(folder, tmp_path, shuffle_tags=True)
    dropped = [text_of(e.pooled[0]) == "     " for e in seen(data, dropout=0.3)]
    assert 40 < sum(dropped) < 80
    assert not any(text_of(e.pooled[0]) == "     " for e in seen(data, train=False, dropout=1.0))


def mask(folder, name="a.mask.png"):
    """White on the left half."""
    (folder / name).parent.mkdir(exist_ok=True)
    pixels = np.zeros((64, 128), dtype=np.uint8)
    pixels[:, :64] = 255
    Image.fromarray(pixels).save(folder / name)


@pytest.mark.parametrize("name", ["a.mask.png", "masks/a.png"])
def test_masks_weigh_the_loss(folder, tmp_path, name):
    mask(folder, name)
    data, manifest, _ = made(folder, tmp_path, outside_mask=0.25)
    (weight,) = {tuple(e.weight.flatten().tolist()) for e in seen(data)}
    height, width = data.shapes[0]
    weight = torch.tensor(weight).view(1, 1, height, width)
    assert weight[..., : width // 2 - 1].eq(1).all() and weight[..., width // 2 + 1 :].eq(0.25).all()
    # Another weight outside is no other mask: nothing is made anew.
    fresh, other, encoders = made(folder, tmp_path, outside_mask=0.0)
    assert other["samples"][0]["mask"] == manifest["samples"][0]["mask"] and encoders.images == 0
    assert fresh.examples([0], COUNTERS[:1], 0.0, train=False).weight.min() == 0
    off, _, _ = made(folder, tmp_path, masks=False)
    assert off.examples([0], COUNTERS[:1], 0.0, train=True).weight is None


def test_a_mask_is_mirrored_with_its_picture(folder, tmp_path):
    mask(folder)
    data, _, _ = made(folder, tmp_path, flip=True)
    for example in seen(data)[:40]:
        red, trained = example.latents[0, 0] > 0.1, example.weight[0, 0] > 0.5
        assert torch.equal(red, trained)


def test_transparent_pixels_get_a_colour_or_are_left_out(folder, tmp_path):
    pixels = np.full((64, 64, 4), 255, dtype=np.uint8)
    pixels[:, :, :3], pixels[:, 32:, 3] = (255, 0, 0), 0
    Image.fromarray(pixels, "RGBA").save(folder / "a.png")
    size = {"resolution": 64}
    data, _, _ = made(folder, tmp_path, background="#0000ff", **size)
    example = data.examples([0], COUNTERS[:1], 0.0, train=True)
    assert example.weight is None
    assert example.latents[0, :3, 0, 0].tolist() == [1, 0, 0] and example.latents[0, :3, 0, 7].tolist() == [0, 0, 1]
    masked, _, encoders = made(folder, tmp_path, background="#0000FF", alpha="mask", **size)
    assert encoders.images == 0, "the pixels are the same"
    assert masked.weights([0], [False]).flatten(1)[0, :8].tolist() == [1] * 4 + [0] * 4
    white, _, _ = made(folder, tmp_path, **size)
    assert white.latents([0])[0, :3, 0, 7].tolist() == [1, 1, 1]


def test_weights_repeats_and_validation_reach_the_dataset(folder, tmp_path):
    for i in range(9):
        Image.new("RGB", (64, 64), (i * 20, 0, 0)).save(folder / f"{i}.png")
    data, manifest, _ = made(folder, tmp_path, weight=0.5, repeats=3, validation_share=0.3, flip=True)
    assert data.repeats == [3] * len(data)
    assert data.examples([0], COUNTERS[:1], 0.0, train=True).weight.eq(0.5).all()
    held = data.validation
    assert held is not None and held.repeats is None and len(held) + len(data) == 10
    assert not {s["latent"] for s in manifest["validation"]} & {s["latent"] for s in manifest["samples"]}
    assert all("flipped" not in s and "repeats" not in s for s in manifest["validation"])
    assert held.examples([0], COUNTERS[:1], 0.0, train=False).latents.shape[0] == 1
    assert held.validation is None
    cache = Cache(tmp_path / "cache")
    assert all(cache.path(kind, key).exists() for kind, key in entries(manifest))
    assert sum(1 for _ in (tmp_path / "cache").rglob("*.safetensors")) == len(entries(manifest))


def test_every_resolution_is_a_sample(folder, tmp_path):
    data, manifest, _ = made(folder, tmp_path, more_resolutions=(64, 32))
    assert len(data) == 3 and len(set(data.shapes)) == 3 and len({s["latent"] for s in manifest["samples"]}) == 3
    assert [s["image"] for s in manifest["samples"]] == ["a.png"] * 3


def test_crop_is_part_of_the_key_only_where_it_changes_pixels(folder, tmp_path):
    def latent(**settings):
        return made(folder, tmp_path, resolution=64, **settings)[1]["samples"][0]["latent"]

    tall = np.random.default_rng(0).integers(0, 255, (120, 64, 3), dtype=np.uint8)
    assert latent(crop="top") == latent(), "a wide picture has no top to keep"
    Image.fromarray(tall).save(folder / "a.png")
    assert len({latent(), latent(crop="top"), latent(crop="focus")}) == 3
    Image.fromarray(tall[:64]).save(folder / "a.png")
    assert len({latent(), latent(crop="top"), latent(crop="focus"), latent(background="#123456")}) == 1


def test_the_loss_of_masked_pixels(tmp_path):
    g = torch.Generator().manual_seed(0)
    predicted, target = (torch.randn(3, 16, 4, 6, generator=g) for _ in range(2))
    weight = torch.rand(3, 1, 4, 6, generator=g)
    for recipe in (RecipeConfig(), RecipeConfig(loss="huber"), RecipeConfig(loss="smooth_l1")):
        whole = sample_losses(predicted, target, recipe)
        assert torch.equal(sample_losses(predicted, target, recipe, torch.ones_like(weight)), whole)
        each = torch.stack([
            sample_losses(predicted[..., y : y + 1, x : x + 1], target[..., y : y + 1, x : x + 1], recipe)
            for y in range(4) for x in range(6)]).T.view(3, 4, 6)  # fmt: skip
        expected = (each * weight[:, 0]).sum((1, 2)) / 24
        assert torch.allclose(sample_losses(predicted, target, recipe, weight), expected, rtol=1e-5)
        assert sample_losses(predicted, target, recipe, weight * 0).eq(0).all()


def test_what_changed_is_told(folder, tmp_path):
    def now(**settings):
        return made(folder, tmp_path, **settings)[1]

    for i in range(3):
        Image.new("RGB", (64, 64), (i * 50, 9, 0)).save(folder / f"{i}.png")
    old = now()
    assert changes(old, now()) == ""
    (folder / "0.png").rename(folder / "moved.png")
    (folder / "0.txt").write_text("0", encoding="utf-8")
    (folder / "moved.txt").write_text("0", encoding="utf-8")
    assert changes(old, now()) in ("", "their order changed")
    (folder / "1.txt").write_text("other", encoding="utf-8")
    (folder / "2.png").unlink()
    Image.new("RGB", (64, 64), "green").save(folder / "new.png")
    Image.new("RGB", (64, 64), "grey").save(folder / "a.png")
    said = changes(old, now())
    assert said == ("1 picture added (new.png), 1 picture taken out (2.png), 1 picture changed (a.png), "
                    "1 caption changed (1.png)")  # fmt: skip
    assert changes(now(), now(flip=True)).startswith("4 pictures with other repeats, weight or mirroring (")

"""The order of the samples, and reading them back from the cache."""

import collections
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import Dataset, batch_indices, batches_per_epoch, counters_of
from trainer.data.cache import Cache, caption_key, latent_key
from trainer.data.manifest import cache_path_for, cache_root, fingerprint

SHAPES = st.lists(st.sampled_from([(8, 8), (8, 16), (16, 8), (6, 10)]), min_size=1, max_size=40)


@given(shapes=SHAPES, batch=st.integers(1, 9), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_each_epoch_sees_every_sample_once_in_batches_of_one_shape(shapes, batch, seed, epoch):
    count = batches_per_epoch(shapes, batch)
    assert count == sum(-(-n // batch) for n in collections.Counter(shapes).values())
    seen = []
    for step in range(epoch * count + 1, (epoch + 1) * count + 1):
        indices = batch_indices(shapes, batch, seed, step)
        assert 1 <= len(indices) <= batch
        assert len({shapes[i] for i in indices}) == 1
        seen += indices
    assert sorted(seen) == list(range(len(shapes)))


def test_uneven_counts_are_shared_out():
    sizes = [len(batch_indices([(8, 8)] * 16, 5, 0, step)) for step in range(1, 5)]
    assert sizes == [4, 4, 4, 4]


def test_order_differs_by_epoch_and_seed_and_mixes_shapes():
    shapes = [(8, 8)] * 20 + [(8, 16)] * 20
    per_epoch = batches_per_epoch(shapes, 4)

    def epoch(seed, number):
        return [tuple(batch_indices(shapes, 4, seed, number * per_epoch + i + 1)) for i in range(per_epoch)]

    assert epoch(0, 0) != epoch(0, 1) and epoch(0, 0) != epoch(1, 0)
    assert {frozenset(b) for b in epoch(0, 0)} != {frozenset(b) for b in epoch(0, 1)}
    order = [shapes[b[0]] for b in epoch(0, 0)]
    assert order != sorted(order)


def test_order_never_changes_between_versions():
    """Resumed runs continue this very order, under any Python: a change here would break them."""
    shapes = [(8, 8)] * 5 + [(8, 16)] * 3
    assert [batch_indices(shapes, 2, 7, step) for step in (1, 2, 3, 9)] == ORDER


ORDER = [[4, 3], [0, 1], [2], [6, 5]]


REPEATS = st.lists(st.tuples(st.sampled_from([(8, 8), (8, 16)]), st.integers(1, 6)), min_size=1, max_size=25)


@given(entries=REPEATS, batch=st.integers(1, 9), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_each_epoch_sees_every_sample_as_often_as_it_repeats(entries, batch, seed, epoch):
    shapes, repeats = [e[0] for e in entries], [e[1] for e in entries]
    count = batches_per_epoch(shapes, batch, repeats)
    counts = collections.Counter()
    for shape, times in entries:
        counts[shape] += times
    assert count == sum(-(-n // batch) for n in counts.values())
    seen = collections.Counter()
    for step in range(epoch * count + 1, (epoch + 1) * count + 1):
        indices = batch_indices(shapes, batch, seed, step, repeats)
        assert 1 <= len(indices) <= batch and len({shapes[i] for i in indices}) == 1
        seen.update(indices)
    assert seen == dict(enumerate(repeats))


@given(shapes=SHAPES, batch=st.integers(1, 9), seed=st.integers(0, 2**64 - 1), step=st.integers(1, 99))
@settings(max_examples=50, deadline=None)
def test_repeats_of_one_are_no_repeats(shapes, batch, seed, step):
    assert batch_indices(shapes, batch, seed, step, [1] * len(shapes)) == batch_indices(shapes, batch, seed, step)


def test_repeats_are_spread_over_the_epoch():
    shapes, repeats = [(8, 8)] * 12, [4] * 12
    per_epoch = batches_per_epoch(shapes, 3, repeats)
    batches = [batch_indices(shapes, 3, 1, i + 1, repeats) for i in range(per_epoch)]
    assert per_epoch == 16 and all(len(b) == 3 for b in batches)
    assert sum(len(set(b)) == 3 for b in batches) >= 14, "few batches hold a picture twice"
    lone = [batch_indices([(8, 8)], 5, 0, step, [10]) for step in (1, 2, 3)]
    assert lone == [[0] * 5] * 3


def test_a_sample_that_is_in_a_batch_twice_has_other_noise():
    found = counters_of(7, 0, 3, [4, 5, 4, 4])
    assert found == [(7, 0, 3, 4), (7, 0, 3, 5), (7, 0, 3, 4, 1), (7, 0, 3, 4, 2)]


def test_an_epoch_beyond_memory_is_refused():
    with pytest.raises(ValueError, match="lower repeats"):
        batches_per_epoch([(8, 8)] * 1000, 5, [10_000] * 1000)


def test_empty_set_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        batch_indices([], 4, 0, 1)


def _fill(root: Path):
    cache = Cache(root)
    samples = []
    for i, shape in enumerate([(8, 8), (8, 8), (8, 16)]):
        key = latent_key(f"hash{i}", shape[1] * 8, shape[0] * 8, "vae")
        cache.write("latents", key, torch.full((16, *shape), float(i)))
        text = caption_key(f"text {i}", "clip", 4)
        cache.write("captions", text, torch.full((4, 6), i + 0.1, dtype=torch.bfloat16), torch.full((5,), i + 0.1))
        samples.append({"image": f"{i}.png", "latent": key, "shape": list(shape), "caption": text})
    empty = caption_key("", "clip", 4)
    cache.write("captions", empty, torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(5))
    return cache, samples, empty


def _manifest(samples, empty, cache="cache"):
    return {"format": 1, "cache": cache, "samples": samples, "empty_caption": empty,
            "fingerprint": fingerprint(samples, empty)}  # fmt: skip


def test_dataset_reads_latents_and_captions_with_dropout(tmp_path):
    _, samples, empty = _fill(tmp_path / "cache")
    data = Dataset(_manifest(samples, empty), tmp_path)
    assert len(data) == 3 and data.shapes == [(8, 8), (8, 8), (8, 16)] and data.names([2, 0]) == ["2.png", "0.png"]
    latents = data.latents([1, 0])
    assert latents.shape == (2, 16, 8, 8) and latents.dtype == torch.float32
    assert latents[0].eq(1).all() and latents[1].eq(0).all()
    context, pooled = data.captions([1, 2, 2], [False, True, False])
    assert context.shape == (3, 4, 6) and context.dtype == torch.bfloat16 and pooled.dtype == torch.float32
    assert pooled[0].eq(torch.tensor(1.1)).all() and pooled[1].eq(0).all() and pooled[2].eq(torch.tensor(2.1)).all()
    assert data.empty_caption()[0].shape == (1, 4, 6)


def test_memory_is_bounded(tmp_path, monkeypatch):
    _, samples, empty = _fill(tmp_path / "cache")
    data = Dataset(_manifest(samples, empty), tmp_path)
    monkeypatch.setattr("trainer.data.batches._MEMORY_BYTES", 16 * 8 * 8 * 4 + 10)
    for _ in range(2):
        for i in (0, 1, 0):
            assert data.latents([i]).eq(i).all()
            assert data._held <= 16 * 8 * 8 * 4 + 10


def test_a_damaged_entry_names_its_picture_and_is_deleted(tmp_path):
    cache, samples, empty = _fill(tmp_path / "cache")
    path = cache.path("latents", samples[1]["latent"])
    blob = bytearray(path.read_bytes())
    blob[-3] ^= 1
    path.write_bytes(bytes(blob))
    data = Dataset(_manifest(samples, empty), tmp_path)
    with pytest.raises(ValueError, match=r"1\.png"):
        data.latents([0, 1])
    assert not path.exists()


def test_manifest_errors(tmp_path):
    _, samples, empty = _fill(tmp_path / "cache")
    with pytest.raises(ValueError, match="cache folder .*elsewhere.* is gone"):
        Dataset(_manifest(samples, empty, "elsewhere"), tmp_path)
    with pytest.raises(ValueError, match="format 9"):
        Dataset({**_manifest(samples, empty), "format": 9}, tmp_path)
    with pytest.raises(ValueError, match="no samples"):
        Dataset(_manifest([], empty), tmp_path)


def test_cache_path_is_relative_inside_and_beside_the_run(tmp_path):
    home, run = tmp_path / "home", tmp_path / "home" / "run"
    for root, expected in ((home / "cache", "../cache"), (run / "data" / "cache", "data/cache")):
        root.mkdir(parents=True)
        named = cache_path_for(root, run)
        assert named == expected
        assert cache_root({"cache": named}, run) == root
    far = tmp_path / "far"
    far.mkdir()
    assert cache_path_for(far, run) == str(far) and cache_root({"cache": str(far)}, run) == far
    assert cache_path_for(home / "cache", None) == str(home / "cache")


def test_the_package_does_not_import_torch():
    code = (
        "import sys, trainer.data, trainer.data.batches, trainer.data.cache, trainer.data.scan\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

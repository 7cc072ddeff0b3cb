"""Samples as they are read back from the cache."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.data.batches import Dataset
from trainer.data.cache import Cache, caption_key, latent_key
from trainer.data.manifest import cache_path_for, cache_root, fingerprint


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


def test_what_was_read_last_is_kept_the_longest(tmp_path, monkeypatch):
    cache, samples, empty = _fill(tmp_path / "cache")
    data = Dataset(_manifest(samples, empty), tmp_path)
    monkeypatch.setattr("trainer.data.batches._MEMORY_BYTES", 3 * 16 * 8 * 8 * 4 + 10)
    for i in (0, 1, 0, 2):
        data.latents([i])
    for i in range(3):
        cache.path("latents", samples[i]["latent"]).unlink()
    data.latents([0]), data.latents([2])
    with pytest.raises(ValueError, match=r"1\.png"):
        data.latents([1])


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

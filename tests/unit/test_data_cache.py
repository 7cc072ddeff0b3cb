"""What is encoded again, and what is not."""

import logging
import shutil

import numpy as np
import pytest
import torch
from block_means import Encoders
from PIL import Image

from trainer.config import DatasetConfig
from trainer.data.batches import Dataset
from trainer.data.cache import Cache, caption_key, latent_key, look, prepare
from trainer.data.encode import fill
from trainer.data.images import ImageProblem
from trainer.data.pace import Pace
from trainer.data.scan import scan_folder


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, (colour, size) in enumerate([("red", (64, 64)), ("green", (64, 64)), ("blue", (200, 100))]):
        Image.new("RGB", size, colour).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(colour, encoding="utf-8")
    return folder


def run(folder, tmp_path, encoders=None, **changes):
    encoders = encoders or Encoders()
    config = DatasetConfig(folder=str(folder), resolution=64, bucket_step=16)
    options = {"vae_id": "vae", "text_id": "clip", "token_length": 12, "run_dir": tmp_path / "run"} | changes
    manifest = prepare(
        scan_folder(config), config, Cache(tmp_path / "cache"),
        encode_images=encoders.encode_images, encode_captions=encoders.encode_captions, **options,
    )  # fmt: skip
    return manifest, encoders


def test_prepare_then_read(folder, tmp_path):
    told = []
    manifest, encoders = run(folder, tmp_path, progress=lambda *a: told.append(a))
    assert encoders.images == 3 and sorted(encoders.texts) == ["", "blue", "green", "red"]
    assert manifest["cache"] == "../cache" and [s["image"] for s in manifest["samples"]] == ["0.png", "1.png", "2.png"]
    assert told[-1] == ("captions", 4, 4) and ("images", 3, 3) in told
    data = Dataset(manifest, tmp_path / "run")
    assert data.shapes == [(8, 8), (8, 8), (6, 10)]
    latents = data.latents([1, 0])
    green = torch.tensor([0, 128 / 255, 0])
    assert torch.allclose(latents[0, :3], green[:, None, None].expand(3, 8, 8), atol=1e-6)
    context, pooled = data.captions([0, 0], [False, True])
    assert context.dtype == torch.bfloat16 and pooled.dtype == torch.float32
    assert pooled[0, :3].tolist() == [ord(c) for c in "red"] and pooled[1].eq(ord(" ")).all()
    # A run and its cache are moved together.
    (tmp_path / "run").mkdir()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(tmp_path / "cache", moved / "cache")
    assert Dataset(manifest, moved / "run").latents([0]).shape == (1, 16, 8, 8)


def test_nothing_is_encoded_twice_whatever_it_is_called(folder, tmp_path):
    first, _ = run(folder, tmp_path)
    again, encoders = run(folder, tmp_path)
    assert again == first and encoders.images == 0 and encoders.texts == []
    (folder / "sub").mkdir()
    shutil.copy(folder / "0.txt", folder / "sub" / "0.txt")
    shutil.copy(folder / "0.png", folder / "sub" / "0.png")  # the same name in two folders, the same picture
    Image.new("RGB", (64, 64), "grey").save(folder / "0.jpg")  # beside 0.png, and sharing its caption
    renamed = folder.rename(tmp_path / "renamed")
    manifest, encoders = run(renamed, tmp_path)
    assert encoders.images == 1 and encoders.texts == []
    by_name = {s["image"]: s for s in manifest["samples"]}
    assert by_name["sub/0.png"]["latent"] == by_name["0.png"]["latent"] != by_name["0.jpg"]["latent"]
    assert by_name["0.jpg"]["caption"] == by_name["0.png"]["caption"]


def test_only_what_changed_is_encoded(folder, tmp_path):
    first, _ = run(folder, tmp_path)
    (folder / "1.txt").write_text("a green one", encoding="utf-8")
    manifest, encoders = run(folder, tmp_path)
    assert encoders.images == 0 and encoders.texts == ["a green one"]
    assert manifest["fingerprint"] != first["fingerprint"]
    Image.new("RGB", (64, 64), "black").save(folder / "1.png")
    _, encoders = run(folder, tmp_path)
    assert encoders.images == 1 and encoders.texts == []


@pytest.mark.parametrize("change", [{"vae_id": "other"}, {"text_id": "other"}, {"token_length": 13}])
def test_other_encoders_have_other_entries(folder, tmp_path, change):
    run(folder, tmp_path)
    _, encoders = run(folder, tmp_path, **change)
    assert (encoders.images, len(encoders.texts)) == ((3, 0) if "vae_id" in change else (0, 4))


def _flip(data):
    data[-5] ^= 16
    return data


@pytest.mark.parametrize("damage", [
    _flip,
    lambda d: d[: len(d) // 2],
    lambda d: d[:5],
    lambda d: b"",
    lambda d: d.replace(b'"F32"', b'"I32"').replace(b'"BF16"', b'"I16" '),
    lambda d: d[:8] + b"[" + d[9:],
    lambda d: b"\xff" * 8 + d[8:],
])  # fmt: skip
@pytest.mark.parametrize("kind", ["latents", "captions"])
def test_a_damaged_entry_is_made_anew_with_a_warning(folder, tmp_path, damage, kind, caplog):
    manifest, _ = run(folder, tmp_path)
    cache = Cache(tmp_path / "cache")
    key = manifest["samples"][1][{"latents": "latent", "captions": "caption"}[kind]]
    path = cache.path(kind, key)
    whole = path.read_bytes()
    path.write_bytes(bytes(damage(bytearray(whole))))
    with caplog.at_level(logging.WARNING):
        again, encoders = run(folder, tmp_path)
    assert (encoders.images, encoders.texts) == ((1, []) if kind == "latents" else (0, ["green"]))
    assert any("damaged" in r.message and key in r.message for r in caplog.records)
    assert again == manifest and path.read_bytes() == whole


def test_an_entry_of_another_shape_is_made_anew(folder, tmp_path):
    manifest, _ = run(folder, tmp_path)
    Cache(tmp_path / "cache").write("latents", manifest["samples"][0]["latent"], torch.zeros(4, 8, 8))
    _, encoders = run(folder, tmp_path)
    assert encoders.images == 1


def test_cancelling_keeps_what_was_encoded(folder, tmp_path):
    class Cancelled(Exception):
        pass

    def stop(stage, done, total):
        raise Cancelled

    encoders = Encoders()
    with pytest.raises(Cancelled):
        run(folder, tmp_path, encoders, progress=stop)
    assert encoders.images == 2  # the first batch: batches hold one bucket
    _, encoders = run(folder, tmp_path)
    assert encoders.images == 1


def test_errors_name_what_to_change(folder, tmp_path, monkeypatch):
    class Broken(Encoders):
        def encode_images(self, pixels):
            return super().encode_images(pixels) * float("nan")

    with pytest.raises(ValueError, match=r"VAE's latent of .*png holds NaN"):
        run(folder, tmp_path, Broken())

    class Small(Encoders):
        def encode_images(self, pixels):
            return super().encode_images(pixels)[:, :4]

    with pytest.raises(ValueError, match="use the Flux VAE"):
        run(folder, tmp_path, Small())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ValueError, match=r"needs .* GB .*free"):
        run(folder, tmp_path)


def test_a_picture_that_changes_between_scan_and_encoding_is_named(folder, tmp_path):
    config = DatasetConfig(folder=str(folder), resolution=64, bucket_step=16)
    report, encoders = scan_folder(config), Encoders()
    Image.new("RGB", (64, 64), "black").save(folder / "1.png")
    with pytest.raises(ImageProblem, match=r"1\.png: changed"):
        prepare(report, config, Cache(tmp_path / "cache"), encode_images=encoders.encode_images,
                encode_captions=encoders.encode_captions, vae_id="v", text_id="t", token_length=12)  # fmt: skip


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    cache, key = Cache(tmp_path), latent_key("h", 64, 64, "v")
    cache.write("latents", key, torch.ones(16, 8, 8))
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=r"disk of the cache folder .* is full"):
        cache.write("latents", key, torch.zeros(16, 8, 8))
    assert [p.name for p in cache.path("latents", key).parent.iterdir()] == [f"{key}.safetensors"]
    read = cache.read("latents", key)
    assert read is not None and read[0].eq(1).all()


def test_keys_tell_apart_what_must_differ():
    keys = {latent_key(*a) for a in [("h", 64, 64, "v"), ("h", 64, 80, "v"), ("h", 80, 64, "v"), ("i", 64, 64, "v"),
                                     ("h", 64, 64, "w")]}  # fmt: skip
    keys |= {caption_key(*a) for a in [("a", "t", 1), ("a", "t", 2), ("a", "u", 1), ("b", "t", 1), ("", "t", 1)]}
    assert len(keys) == 10


def test_many_pictures_are_encoded_in_bounded_batches(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(37):
        Image.fromarray(np.full((64, 64, 3), i, np.uint8)).save(folder / f"{i}.png")
    sizes = []

    class Counting(Encoders):
        def encode_images(self, pixels):
            sizes.append(len(pixels))
            return super().encode_images(pixels)

    manifest, _ = run(folder, tmp_path, Counting())
    assert sizes == [16, 16, 5]
    data = Dataset(manifest, tmp_path / "run")
    assert torch.allclose(data.latents(range(37))[:, 0, 0, 0] * 255, torch.arange(37.0))


def test_keys_never_change():
    """A cache of earlier versions stays of use: these are keys that they made."""
    assert latent_key("ab" * 32, 1024, 768, "vae") == "6031468ef8a4729cdf8a48abd2889bc680f92065"
    assert caption_key("a caf\u00e9", "clip", 512) == "96ab0cb23c8c200ace2d1277cd6e520bc8a18ac0"
    plain = latent_key("h", 64, 64, "v")
    assert latent_key("h", 64, 64, "v", crop="centre", background="#FFFFFF", mirrored=False) == plain
    others = [{"crop": "top"}, {"crop": "focus"}, {"background": "#000000"}, {"mirrored": True},
              {"background": "#000000", "mirrored": True}]  # fmt: skip
    assert len({plain, *(latent_key("h", 64, 64, "v", **o) for o in others)}) == 6


def ready(folder, tmp_path, **options):
    config = DatasetConfig(folder=str(folder), resolution=64, bucket_step=16, **options)
    return look(scan_folder(config), Cache(tmp_path / "cache"), vae_id="v", text_id="t", token_length=12)


def test_the_disk_that_the_cache_takes_is_known_before(folder, tmp_path, monkeypatch):
    for i in range(3):
        Image.fromarray(np.full((64, 64), 255 * (i % 2), np.uint8)).save(folder / f"{i}.mask.png")
    todo, encoders = ready(folder, tmp_path, flip=True), Encoders()
    assert (len(todo.latents), len(todo.captions), len(todo.masks)) == (6, 4, 3)
    said = todo.require_space()
    assert "6 pictures and 4 captions to encode" in said and "free" in said
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(ValueError, match=r"^the cache folder .* needs [0-9.]+ GB and its disk has 0\.001 GB free: .*$"):
        todo.require_space()
    monkeypatch.undo()
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == [], "nothing is written before"
    fill(todo, encoders.encode_images, encoders.encode_captions)
    taken = sum(-(-p.stat().st_size // 4096) * 4096 for p in (tmp_path / "cache").rglob("*.safetensors"))
    assert taken <= todo.size < taken + 4 * 12 * 4096 * 2 + 13 * 4096
    again = ready(folder, tmp_path, flip=True)
    assert again.size == 0 and again.require_space().endswith("has all of it")
    assert fill(again, encoders.encode_images, encoders.encode_captions) == todo.manifest and encoders.images == 6


def test_entries_are_read_once_a_process_while_they_stay_as_they_are(folder, tmp_path, monkeypatch):
    manifest, _ = run(folder, tmp_path)
    reads = []
    original = Cache._bytes
    monkeypatch.setattr(Cache, "_bytes", lambda self, kind, key: reads.append(key) or original(self, kind, key))
    run(folder, tmp_path)
    assert len(reads) == 7
    run(folder, tmp_path)
    assert len(reads) == 7
    key = manifest["samples"][0]["latent"]
    path = Cache(tmp_path / "cache").path("latents", key)
    path.write_bytes(path.read_bytes()[:-1])
    _, encoders = run(folder, tmp_path)
    assert encoders.images == 1 and reads[7:] == [key]
    path.unlink()
    _, encoders = run(folder, tmp_path)
    assert encoders.images == 1


def test_how_fast_and_how_long(monkeypatch, folder, tmp_path, caplog):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = Pace()
    assert pace.text("images", 4, 100) == "images: 4 of 100"
    now[0] += 10
    assert pace.text("images", 24, 100) == "images: 24 of 100, 2 a second, 0:00:38 left"
    assert pace.text("captions", 8, 10) == "captions: 8 of 10"
    monkeypatch.undo()
    with caplog.at_level(logging.INFO):
        run(folder, tmp_path)
    assert any("encoded images: 3 of 3" in r.message for r in caplog.records)


def test_a_mask_that_changes_is_made_anew_and_nothing_else(folder, tmp_path):
    def put(value):
        Image.fromarray(np.full((64, 64), value, np.uint8)).save(folder / "0.mask.png")
        return run(folder, tmp_path)

    first, encoders = put(255)
    second, encoders = put(100)
    assert encoders.images == 0 and encoders.texts == []
    assert first["samples"][0]["mask"] != second["samples"][0]["mask"] and "mask" not in first["samples"][1]
    assert first["fingerprint"] != second["fingerprint"]
    damaged = Cache(tmp_path / "cache").path("masks", second["samples"][0]["mask"])
    damaged.write_bytes(b"x")
    assert put(100)[0] == second and damaged.stat().st_size > 100

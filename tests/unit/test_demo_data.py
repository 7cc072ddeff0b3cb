"""The demo's drawings, VAE, captions and files; the sampler."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from trainer import demo_data
from trainer.demo_data import CAPTIONS, NAMES, CaptionEncoder, LinearVAE, draw, drawings, write_demo
from trainer.flux.model import LATENT_SCALE, LATENT_SHIFT
from trainer.sample import euler, schedule


def test_drawings_are_16_different_antialiased_pictures():
    pictures = drawings()
    assert pictures.shape == (16, 64, 64, 3) and len(set(CAPTIONS)) == 16 and CAPTIONS[0] == "a red circle"
    assert len({p.tobytes() for p in pictures}) == 16
    assert (pictures[:, 0, 0] == 1).all() and not (pictures[:, 36, 32] == 1).all(-1).any()
    circle = np.asarray(draw("red", "circle")).reshape(-1, 3)
    assert len(np.unique(circle, axis=0)) > 10  # more than the two colours: edges are mixed


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"))


def test_vae_gives_the_drawings_back(files):
    vae, pixels = LinearVAE.load(files["vae"]), torch.from_numpy(drawings())
    latents = vae.encode(pixels)
    assert latents.shape == (16, 16, 8, 8) and latents.dtype == torch.float32
    back = vae.decode(latents)
    assert back.shape == pixels.shape and (back - pixels).pow(2).mean().sqrt() < 0.06
    # Linear: what it can show it gives back exactly (before clamping).
    inside = vae.decode(torch.full((1, 16, 2, 3), LATENT_SHIFT))
    assert torch.allclose(vae.decode(vae.encode(inside)), inside, atol=1e-5)
    with pytest.raises(ValueError, match="divisible by 8"):
        vae.encode(torch.zeros(1, 12, 16, 3))


def test_latents_have_about_unit_variance_in_model_space(files):
    latents = (LinearVAE.load(files["vae"]).encode(torch.from_numpy(drawings())) - LATENT_SHIFT) * LATENT_SCALE
    assert 0.8 < latents.var() < 1.2 and latents.mean().abs() < 0.2
    assert (latents.var((0, 2, 3)) > 0.3).all() and (latents.var((0, 2, 3)) < 2).all()


def test_vae_is_fixed():
    first, second = LinearVAE.fitted(), LinearVAE.fitted()
    assert first.basis.equal(second.basis) and first.scale.equal(second.scale)
    assert torch.allclose(first.basis @ first.basis.T, torch.eye(16), atol=1e-5)
    assert (first.scale.diff() <= 0).all()


def test_captions(files):
    encoder = CaptionEncoder.load(files["captions"])
    context, pooled = encoder.encode(CAPTIONS)
    assert context.shape == (16, 16, 128) and pooled.shape == (16, 64) and context.dtype == torch.float32
    assert len({c.numpy().tobytes() for c in context}) == 16 and len({p.numpy().tobytes() for p in pooled}) == 16
    again = CaptionEncoder.made().encode(CAPTIONS)
    assert again[0].equal(context) and again[1].equal(pooled)
    spelt = encoder.encode([" A  Red, circle!"])
    assert spelt[0][0].equal(context[0])
    swapped, _ = encoder.encode(["circle red a"])
    assert not swapped[0].equal(context[0])


def test_captions_of_any_words_and_lengths(files):
    encoder = CaptionEncoder.load(files["captions"])
    context, pooled = encoder.encode(["", "a photo of a \u732b caf\u00e9", "word " * 99, "other " * 99])
    assert context.shape == (4, 16, 128) and torch.isfinite(context).all() and torch.isfinite(pooled).all()
    assert not context[2].equal(context[3])
    assert 0.5 < pooled.std() < 2
    # Fixed for ever: runs that were cached before must find the same vectors.
    assert encoder._word("photo").equal(encoder.tensors["hashed"][PHOTO_ROW])


PHOTO_ROW = 1621


def test_files_are_made_once_and_whole(files):
    from trainer.data.scan import scan_folder
    from trainer.flux.variants import inspect_file

    info = inspect_file(files["flux"])
    assert info.trainable and info.variant == "dev" and info.dtype == "f32" and 900_000 < info.params < 1_200_000
    config = demo_data.settings(files)["dataset"]
    report = scan_folder(config)
    assert [s.caption for s in report.samples] == list(CAPTIONS)
    assert [s.relative for s in report.samples][:2] == ["00_red_circle.png", "01_green_circle.png"]
    assert {s.bucket for s in report.samples} == {(64, 64)} and not report.skipped and not report.warnings
    names = sorted(p.name for p in files["flux"].parent.iterdir())
    assert names == ["demo_captions.safetensors", "demo_vae.safetensors", "drawings", "flux_demo.safetensors"]
    before = files["flux"].stat().st_mtime_ns
    (files["drawings"] / "03_yellow_circle.png").unlink()
    write_demo(files["flux"].parent)
    assert files["flux"].stat().st_mtime_ns == before
    assert (np.asarray(Image.open(files["drawings"] / "03_yellow_circle.png")) == np.asarray(draw(*NAMES[3]))).all()


def test_wrong_files_are_named(files, tmp_path):
    for load, path in ((LinearVAE.load, files["captions"]), (CaptionEncoder.load, files["flux"])):
        with pytest.raises(ValueError, match=path.name):
            load(path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot write the demo's files"):
        write_demo(tmp_path / "file")


def test_schedule_is_shifted_and_ends_clean():
    levels = schedule(10, 8, 8)
    assert levels[0] == 1 and levels[-1] == 0 and all(a > b for a, b in zip(levels, levels[1:], strict=False))
    shift = math.exp(0.5 + 0.65 * (16 - 256) / (4096 - 256))
    assert levels[5] == pytest.approx(shift * 0.5 / (1 + (shift - 1) * 0.5))


@pytest.mark.parametrize("guidance", [None, 1.0])
def test_euler_follows_the_flow(guidance):
    """A straight flow is integrated exactly in any number of steps; the model is told what it should be."""
    data, noise = torch.randn(2, 16, 4, 6), torch.randn(2, 16, 4, 6)
    seen = []

    def velocity(x, timestep, context, pooled, told):
        assert torch.allclose(x, torch.lerp(data, noise, timestep.view(-1, 1, 1, 1)), atol=1e-5)
        assert (told is None) == (guidance is None) and (told is None or told.tolist() == [1.0, 1.0])
        seen.append(timestep.tolist())
        return noise - data

    result = euler(velocity, noise, torch.zeros(2, 1, 1), torch.zeros(2, 1), steps=7, guidance=guidance)
    assert torch.allclose(result, data, atol=1e-5)
    assert len(seen) == 7 and seen[0] == [1.0, 1.0]

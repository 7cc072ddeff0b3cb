"""Exported files: what they hold, what they say of themselves, and what remains after each way of failing."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from workers import wait_for

from tests.conftest import write_flux
from trainer.cli.main import main
from trainer.config import LoraConfig
from trainer.export import reread
from trainer.export.bundle import companions
from trainer.export.describe import describe
from trainer.export.extract import EXACT_BELOW, is_factored, lora_name, low_rank
from trainer.export.fp8 import is_quantized, scaled_entries
from trainer.export.write import ExportOptions, export
from trainer.flux.model import TINY
from trainer.flux.sizes import shapes_of
from trainer.loop import Trainer
from trainer.optim.average import decay_at
from trainer.run import RunDirectory
from trainer.weights import Entry, WriteFailed, entry, write_safetensors


@pytest.fixture
def trained(tiny) -> tuple[RunDirectory, Trainer]:
    """A run of two steps at a rate that moves every weight, in memory and in a save point."""
    config, folder, manifest = tiny(optimizer={"lr": 3e-3, "weight_precision": "split"})
    run = RunDirectory.create(folder, config, manifest)
    trainer = Trainer(config, folder, dataset=manifest)
    for _ in range(2):
        trainer.train_step()
    run.write_save_point(2, trainer.save)
    return run, trainer


def exact(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {e.name: torch.cat([c.flatten() for c in e.chunks()]).view(e.shape) for e in trainer.entries("f32")}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def write(run: RunDirectory, path: Path, trainer: Trainer | None = None, **options) -> dict:
    return export(run, path, ExportOptions(**options), trainer=trainer)


# -- whole models


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "fp8"])
def test_the_save_point_gives_the_file_that_the_engine_gives(trained, tmp_path, dtype):
    run, trainer = trained
    out = tmp_path / "out"
    out.mkdir()
    done = write(run, out / "live.safetensors", trainer, dtype=dtype)
    again = write(run, out / "saved.safetensors", dtype=dtype)
    assert done["step"] == again["step"] == 2 and done["bytes"] == (out / "live.safetensors").stat().st_size
    live, saved = (load_file(out / f"{name}.safetensors") for name in ("live", "saved"))
    assert live.keys() == saved.keys()
    assert all(torch.equal(raw(live[n]), raw(saved[n])) for n in live)
    if dtype != "fp8":
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
        assert all(torch.equal(live[n], t.to(kind)) for n, t in exact(trainer).items())
    assert left(out) == ["live.safetensors", "saved.safetensors"]


def test_scaled_fp8_is_near_and_leaves_the_ends_alone(trained, tmp_path):
    run, trainer = trained
    write(run, tmp_path / "a.safetensors", trainer, dtype="fp8")
    file, wanted = load_file(tmp_path / "a.safetensors"), exact(trainer)
    assert file["scaled_fp8"].dtype == torch.float8_e4m3fn and file["scaled_fp8"].numel() == 2
    for name, value in wanted.items():
        scale = file.pop(name.removesuffix(".weight") + ".scale_weight", None)
        if not is_quantized(name, value.shape):
            assert scale is None and torch.equal(file[name], value.bfloat16()), name
            continue
        assert scale is not None and scale.shape == () and scale.dtype == torch.float32
        assert file[name].dtype == torch.float8_e4m3fn
        assert float(scale) == pytest.approx(float(value.abs().max()) / 448, rel=1e-6)
        found = file[name].float() * scale
        # Half a step of the 3 bits behind the leading one, or half of the smallest number.
        assert bool(((found - value).abs() <= (value.abs() / 16).clamp(min=float(scale) * 2**-10 * 1.001)).all()), name
    assert sum(is_quantized(n, v.shape) for n, v in wanted.items()) == 13
    assert not is_quantized("img_in.weight", (128, 64)) and not is_quantized("final_layer.linear.weight", (64, 128))


def test_the_scale_is_of_use():
    """Weights as small as those of a wide Flux: a bare cast has two or three bits left for them."""
    value = 0.01 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    _, scale, matrix = scaled_entries([entry("single_blocks.0.linear1.weight", value)])
    found = next(iter(matrix.chunks())).float() * next(iter(scale.chunks()))
    bare = value.to(torch.float8_e4m3fn).float()
    assert (found - value).square().mean() < (bare - value).square().mean() / 3


def test_fp8_of_nothing_and_of_nonsense():
    zero = scaled_entries([Entry("double_blocks.0.a.weight", "F32", (2, 3), lambda: iter((torch.zeros(2, 3),)))])
    values = {e.name: torch.cat([c.flatten().float() for c in e.chunks()]) for e in zero}
    assert values["double_blocks.0.a.scale_weight"].tolist() == [1.0]
    assert values["double_blocks.0.a.weight"].tolist() == [0.0] * 6
    bad = scaled_entries([entry("single_blocks.0.a.weight", torch.tensor([[1.0, float("nan")]]))])
    with pytest.raises(ValueError, match="single_blocks.0.a.weight has values that are not finite"):
        list(bad[1].chunks())


# -- LoRAs


def apply(parent: dict[str, torch.Tensor], lora: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parent with a LoRA merged, by the plain reading of its names."""
    made, used = {}, set()
    for name, value in parent.items():
        x, value = lora_name(name), value.float()
        key = f"{x}.diff_b" if name.endswith(".bias") else f"{x}.diff"
        if f"{x}.lora_up.weight" in lora and not name.endswith(".bias"):
            up, down, alpha = (lora[f"{x}.{k}"].float() for k in ("lora_up.weight", "lora_down.weight", "alpha"))
            value = value + float(alpha) / down.shape[0] * (up @ down)
            used |= {f"{x}.lora_up.weight", f"{x}.lora_down.weight", f"{x}.alpha"}
        elif key in lora:
            value = value + lora[key].float()
            used.add(key)
        made[name] = value
    assert used == set(lora)
    return made


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(sum((a[n].float() - b[n].float()).square().sum() for n in a)) ** 0.5


def test_a_lora_of_full_rank_is_the_training(trained, tmp_path):
    run, trainer = trained
    done = write(run, tmp_path / "lora.safetensors", trainer, lora_rank=128, dtype="f32")
    parent, wanted = load_file(run.config.model.flux), exact(trainer)
    made = apply(parent, load_file(tmp_path / "lora.safetensors"))
    assert distance(parent, wanted) > 0.1
    assert all(torch.allclose(made[n], wanted[n], rtol=0, atol=1e-6) for n in wanted)
    assert "keeps 100.0% of the change" in done["text"]
    assert metadata(tmp_path / "lora.safetensors")["flux_fft.kept"] == "1.000000"


@pytest.mark.parametrize("saved", [False, True])
def test_what_a_lora_keeps_is_told_and_true(trained, tmp_path, saved):
    run, trainer = trained
    parent, wanted, seen = load_file(run.config.model.flux), exact(trainer), []
    whole = distance(parent, wanted) ** 2
    for rank in (1, 4, 16, 60):
        path = tmp_path / f"{rank}.safetensors"
        done = write(run, path, None if saved else trainer, lora_rank=rank)
        about = metadata(path)
        kept = 1 - distance(apply(parent, load_file(path)), wanted) ** 2 / whole
        assert float(about["flux_fft.kept"]) == pytest.approx(kept, abs=1e-4)
        assert f"keeps {kept:.1%}" in done["text"] and about["modelspec.architecture"] == "flux-1-dev/lora"
        assert about["flux_fft.lora_rank"] == about["ss_network_dim"] == str(rank)
        each = json.loads(about["flux_fft.kept_by_matrix"])
        assert each.keys() == {n.removesuffix(".weight") for n, s in shapes_of(TINY.__dict__).items() if len(s) == 2}
        assert all(0 < share <= 1 for share in each.values())
        seen.append(kept)
    assert seen == sorted(seen) and seen[0] < 0.5 and seen[-1] > 0.9
    assert left(tmp_path) == sorted([f"{r}.safetensors" for r in (1, 4, 16, 60)] + ["run"])


@pytest.mark.parametrize("shape", [(40, 700), (640, 768), (1536, 600)])
def test_factors_are_next_to_the_best_there_are(shape):
    """Against the exact SVD, of a change whose singular values fall slowly: the hard case."""
    g = torch.Generator().manual_seed(0)
    m, n = shape
    left_, right = (torch.linalg.qr(torch.randn(k, min(shape), generator=g))[0] for k in shape)
    change = 1e-3 * left_ * torch.arange(1, min(shape) + 1) ** -0.4 @ right.T
    values = torch.linalg.svdvals(change.double())
    for rank in (4, 32, min(shape)):
        up, down = low_rank(change, rank, "a")
        assert up.shape == (m, rank) and down.shape == (rank, n)
        best = float(values[rank:].square().sum()) ** 0.5
        error = float((change - up @ down).norm())
        assert error <= best * 1.005 + 1e-5 * float(change.norm())
        assert torch.allclose(up.norm(dim=0), down.norm(dim=1), rtol=1e-3), "neither factor is small"
        again = low_rank(change, rank, "a")
        assert torch.equal(again[0], up) and torch.equal(again[1], down)
    assert min(shape) < EXACT_BELOW or not torch.equal(low_rank(change, 4, "b")[0], low_rank(change, 4, "a")[0])


def test_factors_are_only_used_where_they_save_something():
    assert is_factored((3072, 3072), 1535) and not is_factored((3072, 3072), 1536)
    assert not is_factored((3072, 64), 63) and is_factored((3072, 64), 62) and not is_factored((3072,), 1)


def test_a_merged_lora_counts_as_part_of_the_training(trained, tmp_path):
    """Whoever is given the LoRA has the model's file, and nothing else."""
    run, trainer = trained
    save_file({"a": torch.zeros(1)}, tmp_path / "merged.safetensors")
    lora = LoraConfig(path=str(tmp_path / "merged.safetensors"), strength=0.5)
    trainer.config = dataclasses.replace(trainer.config, model=dataclasses.replace(trainer.config.model, loras=(lora,)))
    write(run, tmp_path / "lora.safetensors", trainer, lora_rank=128, dtype="f32")
    made = apply(load_file(run.config.model.flux), load_file(tmp_path / "lora.safetensors"))
    assert distance(made, exact(trainer)) < 1e-4
    origin = json.loads(metadata(tmp_path / "lora.safetensors")["flux_fft.parent"])
    assert origin["loras"][0]["strength"] == 0.5 and len(origin["loras"][0]["sha256"]) == 64
    assert "merged.safetensors" not in json.dumps(metadata(tmp_path / "lora.safetensors"))


def test_a_lora_of_an_untrained_run_or_of_another_parent_is_refused(tiny, trained, tmp_path):
    config, folder, manifest = tiny(name="fresh")
    run = RunDirectory.create(folder, config, manifest)
    fresh = Trainer(config, folder, dataset=manifest)
    with pytest.raises(ValueError, match="there is no LoRA of them: train the run first"):
        write(run, tmp_path / "x.safetensors", fresh, lora_rank=4)
    run, trainer = trained
    run.flux(resumed=False)  # as it is noted when a run begins
    write_flux(Path(run.config.model.flux), seed=1)
    with pytest.raises(ValueError, match="is another Flux than the one that this run began with"):
        write(run, tmp_path / "x.safetensors", trainer, lora_rank=4)
    Path(run.config.model.flux).unlink()
    with pytest.raises(ValueError, match="does not exist"):
        write(run, tmp_path / "x.safetensors", trainer, lora_rank=4)
    assert write(run, tmp_path / "y.safetensors", trainer)["step"] == 2, "a model needs no parent"
    assert not list(tmp_path.glob("*x.safetensors*"))


# -- options


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "f8"}, "dtype"), ({"lora_rank": -1}, "lora_rank"), ({"lora_rank": 9999}, "lora_rank"),
        ({"from_step": -3}, "from_step"), ({"include": ("everything",)}, "include"),
        ({"lora_rank": 4, "dtype": "fp8"}, "dtype"), ({"lora_rank": 4, "all_in_one": True}, "all_in_one"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        ExportOptions(**options)


def test_steps_and_averages_that_are_not_there_are_told(trained, tmp_path):
    run, trainer = trained
    with pytest.raises(ValueError, match=r"has kept nothing of step 7: it has 2"):
        write(run, tmp_path / "x.safetensors", trainer, from_step=7)
    assert write(run, tmp_path / "x.safetensors", trainer, from_step=2)["step"] == 2
    for source in (trainer, None):
        with pytest.raises(ValueError, match="average"):
            write(run, tmp_path / "y.safetensors", source, ema=True)
    run.write_checkpoint(3, trainer.entries("bf16"), {})
    with pytest.raises(ValueError, match="the checkpoint of step 3 has no average"):
        write(run, tmp_path / "y.safetensors", trainer, from_step=3, ema=True)
    assert not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp8"}, {"lora_rank": 4}])
def test_a_checkpoint_on_the_way_gives_what_it_holds(trained, tmp_path, options):
    """Where its save point is gone: the same file but for what bf16 has lost."""
    run, trainer = trained
    write(run, tmp_path / "then.safetensors", trainer, **options)
    run.write_checkpoint(2, trainer.entries("bf16"), {})
    for point in run.save_points():
        shutil.rmtree(point.path)
    trainer.train_step()
    assert write(run, tmp_path / "now.safetensors", trainer, **options)["step"] == 3
    for source in (trainer, None):
        done = write(run, tmp_path / "found.safetensors", source, from_step=2, overwrite=True, **options)
        assert done["step"] == 2
        then, found, now = (load_file(tmp_path / f"{name}.safetensors") for name in ("then", "found", "now"))
        if "lora_rank" in options:
            then, found, now = (apply(load_file(run.config.model.flux), lora) for lora in (then, found, now))
        assert distance(found, then) < distance(now, then) / 3
        assert options != {"dtype": "bf16"} or distance(found, then) == 0


def test_the_average_is_exported_from_memory_and_from_a_save_point(tiny, tmp_path):
    config, folder, manifest = tiny(optimizer={"lr": 3e-3, "weight_precision": "split"}, recipe={"ema_decay": 0.5})
    run = RunDirectory.create(folder, config, manifest)
    trainer = Trainer(config, folder, dataset=manifest)
    averages = exact(trainer)
    for step in (1, 2, 3):
        trainer.train_step()
        decay = decay_at(0.5, step)
        averages = {n: decay * averages[n] + (1 - decay) * t for n, t in exact(trainer).items()}
    run.write_save_point(3, trainer.save)
    for source in (trainer, None):
        done = write(run, tmp_path / "a.safetensors", source, dtype="f32", ema=True, overwrite=True)
        assert "average at step 3" in done["text"]
        found = load_file(tmp_path / "a.safetensors")
        assert distance(found, averages) < distance(found, exact(trainer)) / 20
        assert metadata(tmp_path / "a.safetensors")["flux_fft.weights"] == "average"


# -- all in one


def parts(folder: Path) -> dict[str, str]:
    g = torch.Generator().manual_seed(0)
    tensors = {
        "clip_l": {"text_model.encoder.layers.0.mlp.fc1.weight": torch.rand(4, 3, generator=g).half(),
                   "logit_scale": torch.tensor(4.6)},
        "t5": {"encoder.block.0.layer.0.SelfAttention.k.weight": torch.rand(3, 3).to(torch.float8_e4m3fn),
               "encoder.block.0.layer.0.SelfAttention.k.scale_weight": torch.tensor(0.5),
               "scaled_fp8": torch.empty(0).to(torch.float8_e4m3fn)},
        "vae": {"decoder.conv_in.weight": torch.rand(2, 16, 3, 3), "encoder.conv_in.weight": torch.rand(2, 3, 3, 3)},
    }  # fmt: skip
    for name, content in tensors.items():
        save_file(content, folder / f"{name}.safetensors")
    return {name: str(folder / f"{name}.safetensors") for name in tensors}


@pytest.mark.parametrize("swapped", [False, True])
def test_all_in_one_holds_the_encoders_and_the_vae_as_they_are(trained, tmp_path, swapped):
    run, trainer = trained
    files = parts(tmp_path)
    if swapped:
        files["clip_l"], files["t5"] = files["t5"], files["clip_l"]
    model = dataclasses.replace(trainer.config.model, **files)
    trainer.config = dataclasses.replace(trainer.config, model=model)
    done = write(run, tmp_path / "all.safetensors", trainer, all_in_one=True)
    found = load_file(tmp_path / "all.safetensors")
    assert "all in one" in done["text"]
    for name, value in exact(trainer).items():
        assert torch.equal(found.pop(f"model.diffusion_model.{name}"), value.bfloat16())
    places = {"clip_l": "text_encoders.clip_l.", "t5": "text_encoders.t5xxl.", "vae": "vae."}
    for kind, place in places.items():
        for name, value in load_file(tmp_path / f"{kind}.safetensors").items():
            inner = "" if kind == "vae" or name == "logit_scale" else "transformer."
            got = found.pop(place + inner + name)
            assert got.dtype == value.dtype and got.shape == value.shape
            assert torch.equal(raw(got), raw(value)), name
    assert not found


def test_quantized_layers_of_an_encoder_are_told_by_tensors(trained, tmp_path):
    run, trainer = trained
    files = parts(tmp_path)
    layers = {"layers": {"encoder.block.0.layer.0.SelfAttention.k": {"format": "float8_e4m3fn"}}}
    content = load_file(files["t5"])
    save_file(content, files["t5"], {"_quantization_metadata": json.dumps(layers)})
    made = {e.name: e for e in companions(dataclasses.replace(trainer.config.model, **files))}
    told = made["text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.k.comfy_quant"]
    assert json.loads(bytes(next(iter(told.chunks())).tolist())) == {"format": "float8_e4m3fn"}


def test_all_in_one_without_its_parts_is_refused(trained, tmp_path):
    run, trainer = trained
    files = parts(tmp_path)
    for kind in files:
        for value, word in (("", "is not chosen"), (str(tmp_path / "gone"), "choose another file"),
                            (run.config.model.flux, "this is no")):  # fmt: skip
            model = dataclasses.replace(trainer.config.model, **{**files, kind: value})
            trainer.config = dataclasses.replace(trainer.config, model=model)
            with pytest.raises(ValueError, match=f"{kind} is .*{word}|{kind} {word}"):
                write(run, tmp_path / "x.safetensors", trainer, all_in_one=True)
    assert not (tmp_path / "x.safetensors").exists()


# -- metadata


def test_a_file_tells_where_it_comes_from(trained, tmp_path):
    from trainer.flux.variants import fingerprint

    run, trainer = trained
    write(run, tmp_path / "a.safetensors", trainer, dtype="f32")
    about, raw = metadata(tmp_path / "a.safetensors"), (tmp_path / "a.safetensors").read_bytes()
    data = raw[8 + int.from_bytes(raw[:8], "little") :]
    assert about["modelspec.hash_sha256"] == "0x" + hashlib.sha256(data).hexdigest()
    assert about["modelspec.sai_model_spec"] == "1.0.1" and about["modelspec.architecture"] == "flux-1-dev"
    assert about["flux_fft.steps"] == "2" and about["flux_fft.weights"] == "trained"
    assert json.loads(about["flux_fft.parent"]) == {"sha256": fingerprint(run.config.model.flux)}
    assert json.loads(about["flux_fft.dataset"]) == {"pictures": 7, "sha256": "f" * 64}
    assert json.loads(about["flux_fft.recipe"])["optimizer"]["lr"] == 3e-3


def test_no_path_caption_or_trigger_word_unless_asked(trained):
    run, _ = trained
    secrets = {"folder": "/home/secret1", "trigger_word": "secret2", "fixed_caption": "secret3",
               "caption_prefix": "secret4", "caption_suffix": "secret5", "validation_folder": "/home/secret6"}
    other = dataclasses.replace(run.config.dataset, **{k: v + "x" for k, v in secrets.items()})
    dataset = dataclasses.replace(run.config.dataset, **secrets, also=(other,))
    model = dataclasses.replace(run.config.model, clip_l="/home/secret7", loras=(LoraConfig(path="/home/secret8"),))
    config = dataclasses.replace(run.config, dataset=dataset, model=model)

    def told(*include: str) -> str:
        about = describe(run, config, step=1, variant="dev", dtype="bf16", include=include)
        return json.dumps(about)

    assert "secret" not in told() and str(run.path.parent) not in told()
    assert {n for n in range(1, 9) if f"secret{n}" in told("trigger")} == {2}
    assert {n for n in range(1, 9) if f"secret{n}" in told("captions")} == {2, 3, 4, 5}
    assert {n for n in range(1, 9) if f"secret{n}" in told("paths")} == {1, 6, 7, 8}
    recipe = json.loads(json.loads(told())["flux_fft.recipe"])
    assert recipe["dataset"]["resolution"] == config.dataset.resolution and len(recipe["dataset"]["also"]) == 1


def test_every_text_of_the_settings_is_hidden_or_one_of_few():
    """A field that is added later is looked at."""
    from trainer.config import DatasetConfig
    from trainer.export.describe import CAPTIONS, PATHS

    choices = {"crop", "alpha", "background", "animations", "missing_captions", "caption_lines"}
    texts = {f.name for f in dataclasses.fields(DatasetConfig) if f.type == "str"}
    assert texts == choices | {*CAPTIONS} | {*PATHS}


# -- what goes wrong


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp8"}, {"lora_rank": 4}])
def test_a_file_that_reads_back_otherwise_is_not_left(trained, tmp_path, monkeypatch, options):
    """The disk flips one bit, anywhere: an older file stays whole, and no part of the new one."""
    run, trainer = trained
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.safetensors").write_bytes(b"the file before")
    real = reread.compare

    def flipped(path: Path, *args, **kwargs):
        with open(path, "r+b") as file:
            place = flipped.place % path.stat().st_size
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 16]))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(reread, "compare", flipped)
    for place in (5, 300, 100_003, -1):
        flipped.place = place
        with pytest.raises(WriteFailed, match="a.safetensors reads back as something else"):
            write(run, out / "a.safetensors", trainer, overwrite=True, **options)
        assert (out / "a.safetensors").read_bytes() == b"the file before" and left(out) == ["a.safetensors"]


@pytest.mark.parametrize("options", [{"dtype": "f32"}, {"dtype": "fp8"}, {"lora_rank": 4}])
def test_an_export_can_be_given_up_at_any_moment(trained, tmp_path, options):
    run, trainer = trained
    out = tmp_path / "out"
    out.mkdir()
    seen: list[str] = []
    export(run, out / "whole.safetensors", ExportOptions(**options), trainer=trainer,
           progress=lambda what, done, total: seen.append(what) or None)  # fmt: skip
    names = ["extracting", "measuring"] if "lora_rank" in options else []
    assert list(dict.fromkeys(seen)) == [*names, "writing", "checking"]
    (out / "whole.safetensors").unlink()
    for stop in range(0, len(seen), max(1, len(seen) // 25)):
        calls = iter(range(len(seen)))

        def report(*_: object, calls=calls, stop=stop) -> None:
            if next(calls) == stop:
                raise ValueError("given up")

        with pytest.raises(ValueError, match="given up"):
            export(run, out / "a.safetensors", ExportOptions(**options), trainer=trainer, progress=report)
        assert left(out) == []


@pytest.mark.parametrize("how", ["cancel", "quit"])
def test_a_worker_leaves_off_exporting_when_it_is_told_to(tiny, serve, tmp_path, monkeypatch, how):
    """Its progress is told meanwhile, and the file that was there stays."""
    config, folder, manifest = tiny()
    worker, client = serve(RunDirectory.create(folder, config, manifest))
    (tmp_path / "a.safetensors").write_bytes(b"the file before")

    def endless(path, entries, about, progress):
        for done in itertools.count():  # a very slow disk
            progress(done, 10**9)
            time.sleep(0.01)

    monkeypatch.setattr(reread, "compare", endless)
    told: list[Exception] = []

    def ask() -> None:
        try:
            client.export(tmp_path / "a.safetensors", "bf16", overwrite=True)
        except Exception as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    now = wait_for(lambda: (client.status() or {}).get("exporting"))
    assert now["what"] in ("writing", "checking") and now["total"] > 0
    wait_for(lambda: (client.status()["exporting"] or {}).get("what") == "checking")
    client.cancel_export() if how == "cancel" else worker.quit("the test says so")
    asking.join(30)
    assert "the export was stopped" in str(told[0])
    assert (tmp_path / "a.safetensors").read_bytes() == b"the file before"
    assert left(tmp_path) == ["a.safetensors", "run"]
    if how == "cancel":
        monkeypatch.undo()
        assert client.status()["exporting"] is None
        assert client.export(tmp_path / "a.safetensors", "bf16", overwrite=True)["step"] == 0


def test_a_title_that_looks_like_a_hash_is_left_alone(trained, tmp_path):
    run, trainer = trained
    title = '"modelspec.hash_sha256":"0x' + "0" * 64
    write(run, tmp_path / "a.safetensors", trainer, metadata={"modelspec.title": title, "a": "0x" + "0" * 64})
    about = metadata(tmp_path / "a.safetensors")
    assert about["modelspec.title"] == title and about["a"] == "0x" + "0" * 64
    assert about["modelspec.hash_sha256"] != "0x" + "0" * 64


def test_a_file_that_came_meanwhile_is_not_replaced(trained, tmp_path):
    run, trainer = trained

    def report(what: str, done: int, total: int) -> None:
        if (what, done) == ("checking", total):
            (tmp_path / "a.safetensors").write_bytes(b"another's")

    with pytest.raises(ValueError, match="exists: choose another name"):
        export(run, tmp_path / "a.safetensors", ExportOptions(), trainer=trainer, progress=report)
    assert (tmp_path / "a.safetensors").read_bytes() == b"another's" and left(tmp_path) == ["a.safetensors", "run"]


def test_progress_ends_at_the_whole(trained, tmp_path):
    run, trainer = trained
    last: dict[str, tuple[int, int]] = {}
    export(run, tmp_path / "a.safetensors", ExportOptions(lora_rank=4), trainer=trainer,
           progress=lambda what, done, total: last.update({what: (done, total)}))  # fmt: skip
    assert all(done == total > 0 for done, total in last.values()) and len(last) == 4


def test_copies_are_given_in_parts(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", [entry("w", torch.arange(10.0))])
    (copy,) = reread.copies(tmp_path / "a.safetensors", {"w": "other.w"}, chunk=4)
    assert copy.name == "other.w" and [c.tolist() for c in copy.chunks()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# -- the command line


def test_the_command_line_has_it_all(trained, tmp_path, capsys):
    run, trainer = trained
    dataset = dataclasses.replace(run.config.dataset, trigger_word="blorp")
    run.update(dataclasses.replace(run.config, dataset=dataset))

    def ask(*words: str) -> str:
        code = main(["export", str(run.path), "--out", str(tmp_path / "a.safetensors"), "--overwrite", *words])
        said = capsys.readouterr()
        assert code == (2 if said.err else 0) and said.err.count("\n") <= 1
        return said.out + said.err

    assert ask("--dtype", "fp8").endswith("fp8, step 2, 1.2 MB\n")
    assert "scaled_fp8" in load_file(tmp_path / "a.safetensors")
    told = json.loads(ask("--lora", "4", "--json", "--include", "trigger"))
    assert told["text"].startswith("LoRA of rank 4, bf16, step 2") and "% of the change" in told["text"]
    assert metadata(tmp_path / "a.safetensors")["modelspec.trigger_phrase"] == "blorp"
    assert "step 2" in ask("--from", "2", "--title", "A title")
    about = metadata(tmp_path / "a.safetensors")
    assert about["modelspec.title"] == "A title" and "blorp" not in json.dumps(about)
    for words, line in ((("--from", "9"), "nothing of step 9"), (("--ema",), "average"),
                        (("--all-in-one",), "clip_l is not chosen"), (("--lora", "4", "--dtype", "fp8"), "a LoRA is")):
        assert line in ask(*words)
    exported = [e for e in run.events() if e["type"] == "exported"]
    assert (exported[0]["file"], exported[0]["folder"]) == ("a.safetensors", str(tmp_path))
    assert left(tmp_path) == ["a.safetensors", "run"]

"""What an exported file says of itself, and what it keeps to itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from exports import metadata, write

from trainer.config import LoraConfig
from trainer.export.describe import describe


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


def test_a_title_that_looks_like_a_hash_is_left_alone(trained, tmp_path):
    run, trainer = trained
    title = '"modelspec.hash_sha256":"0x' + "0" * 64
    write(run, tmp_path / "a.safetensors", trainer, metadata={"modelspec.title": title, "a": "0x" + "0" * 64})
    about = metadata(tmp_path / "a.safetensors")
    assert about["modelspec.title"] == title and about["a"] == "0x" + "0" * 64
    assert about["modelspec.hash_sha256"] != "0x" + "0" * 64


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

"""A run begun from a settings file: its paths start from the file's folder, whatever it names."""

import json

from trainer.cli.headless import from_config_file
from trainer.settings import to_dict


def test_every_path_starts_from_the_file(tiny, tmp_path):
    config, folder, manifest = tiny(name="old")
    (folder / "dataset.json").write_text(json.dumps(manifest))
    settings = to_dict(config)
    settings["model"] |= {"flux": "flux.safetensors", "loras": [{"path": "style.safetensors", "strength": 0.5}]}
    settings["dataset"] |= {"folder": "pictures", "validation_folder": "held",
                            "also": [{**settings["dataset"], "folder": "more", "validation_folder": ""}]}  # fmt: skip
    (folder / "style.safetensors").touch()
    (folder / "run.json.settings").write_text(json.dumps(settings))
    run = from_config_file(folder / "run.json.settings", str(tmp_path / "new"))
    assert run.config.model.flux == str(folder / "flux.safetensors") and run.config.model.vae == ""
    assert [lora.path for lora in run.config.model.loras] == [str(folder / "style.safetensors")]
    assert (run.config.dataset.folder, run.config.dataset.validation_folder) == (
        str(folder / "pictures"), str(folder / "held"))  # fmt: skip
    assert [c.folder for c in run.config.dataset.also] == [str(folder / "more")]
    assert from_config_file(folder / "run.json.settings", str(tmp_path / "new")).config == run.config

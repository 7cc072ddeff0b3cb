"""What an exported file says about itself: ModelSpec 1.0.1, the recipe, and where it comes from.

ModelSpec: https://github.com/Stability-AI/ModelSpec. No path, no caption and no trigger word gets into the metadata
unless it is asked for.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from ..config import DatasetConfig, ModelConfig, RunConfig
from ..header import HASH, NO_HASH
from ..settings import one_of, to_dict
from .model_note import fingerprint_of, noted_fingerprint

if TYPE_CHECKING:
    from ..run import RunDirectory

TEXTS = ("trigger", "captions", "paths")
"""What may be asked for besides: the trigger word; the captions' settings and texts; files and folders."""
_ARCHITECTURES = {"schnell": "flux-1-schnell"}  # all others are made of dev
PATHS = ("folder", "validation_folder")
CAPTIONS = ("trigger_word", "fixed_caption", "caption_prefix", "caption_suffix")


def describe(run: RunDirectory, config: RunConfig, *, step: int, variant: str, dtype: str,
             lora_rank: int = 0, ema: bool = False, include: tuple[str, ...] = ()) -> dict[str, str]:
    """The metadata of a file of ``run`` after ``step`` updates, under the settings ``config``.

    ``include``: of ``TEXTS``. ``ValueError`` for another. It has a place for the hash of the data.
    """
    for what in include:
        one_of("include", what, TEXTS)
    whole, manifest = to_dict(config), run.dataset
    recipe = {"optimizer": whole["optimizer"], "recipe": whole["recipe"], "dataset": _told(config.dataset, include)}
    loras = [{"sha256": fingerprint_of(lora.path), "strength": lora.strength} for lora in config.model.loras]
    origin = noted_fingerprint(run.path / "model.json", config.model.flux)
    about = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": _ARCHITECTURES.get(variant, "flux-1-dev") + ("/lora" if lora_rank else ""),
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": config.name,
        "modelspec.resolution": f"{config.dataset.resolution}x{config.dataset.resolution}",
        "modelspec.date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "flux_fft.steps": str(step),
        "flux_fft.total_steps": str(run.flux(resumed=True).parent_steps + step),
        "flux_fft.dtype": dtype,
        "flux_fft.weights": "average" if ema else "trained",
        "flux_fft.recipe": _json(recipe),
        "flux_fft.dataset": _json({"pictures": len({s.get("image") for s in manifest["samples"]}),
                                   "sha256": manifest["fingerprint"]}),
        "flux_fft.parent": _json({"sha256": origin} | ({"loras": loras} if loras else {})),
        HASH: NO_HASH,
    }  # fmt: skip
    if lora_rank:
        about |= {"flux_fft.lora_rank": str(lora_rank), "ss_network_dim": str(lora_rank),
                  "ss_network_alpha": str(float(lora_rank)), "ss_base_model_version": "flux1"}
    if "trigger" in include and config.dataset.trigger_word:
        about["modelspec.trigger_phrase"] = config.dataset.trigger_word
    if "paths" in include:
        about["flux_fft.files"] = _json(to_dict(config.model))
    return about


def _told(dataset: DatasetConfig, include: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a dataset but for what was not asked for."""
    hidden = {*(() if "paths" in include else PATHS), *(() if "captions" in include else CAPTIONS), "also"}
    told = {name: value for name, value in to_dict(dataset).items() if name not in hidden}
    return told | ({"also": [_told(other, include) for other in dataset.also]} if dataset.also else {})


def parent_of(model: ModelConfig) -> str:
    """The file that a LoRA of the run is for: the model as it was chosen.

    LoRAs that were merged into it before training count as part of what the LoRA holds: whoever is given the LoRA has
    that file, and needs nothing else.
    """
    return model.flux


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))

"""What travels along the links: small frozen handles, never models or live objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from comfy_api.latest import io

from ..trainer.config import ModelConfig

CATEGORY = "Flux Full Fine-Tune"

Model = io.Custom("FLUX_FFT_MODEL")
Dataset = io.Custom("FLUX_FFT_DATASET")
Pictures = io.Custom("FLUX_FFT_PICTURES")
Captions = io.Custom("FLUX_FFT_CAPTIONS")
Optimizer = io.Custom("FLUX_FFT_OPTIMIZER")
Memory = io.Custom("FLUX_FFT_MEMORY")
Recipe = io.Custom("FLUX_FFT_RECIPE")
Run = io.Custom("FLUX_FFT_RUN")
Previews = io.Custom("FLUX_FFT_PREVIEWS")


@dataclass(frozen=True, kw_only=True)
class ModelHandle:
    """The model's files; where a CLIP or VAE came over a link, the key under which the bridge keeps it."""

    config: ModelConfig
    clip_key: str = ""
    vae_key: str = ""


@dataclass(frozen=True, kw_only=True)
class RunHandle:
    """A run at one of its steps. ``uid`` tells it from another run that later takes the same name."""

    name: str
    uid: str
    step: int
    saved: bool = False
    """Whether it is what the run has kept at that step, a save point or checkpoint, and not the run as it is."""


@dataclass(frozen=True, kw_only=True)
class PreviewSettings:
    """Pictures to sample from the weights in training."""

    prompts: tuple[str, ...]
    width: int
    height: int
    sampler: str
    scheduler: str
    sampling_steps: int
    guidance: float
    cfg: float
    preview_seed: int
    every_n_steps: int = field(compare=False)
    """Train Steps samples at multiples of this; 0: only Preview nodes do."""
    average: bool = False
    """Of the running average of the weights."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts is empty: write at least one prompt, each on a line of its own")
        for side in ("width", "height"):
            whole(side, getattr(self, side), 16, 8192)
            if getattr(self, side) % 16:
                raise ValueError(f"{side} is {getattr(self, side)}: give a multiple of 16")
        whole("sampling_steps", self.sampling_steps, 1, 10_000)
        whole("preview_seed", self.preview_seed, 0, 2**64 - 1)
        whole("every_n_steps", self.every_n_steps, 0)
        for name in ("guidance", "cfg"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1000:  # false for NaN
                raise ValueError(f"{name} is {value!r}: give a number from 0 to 1000")


def whole(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number in [low, high]: ComfyUI does not check linked ones."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        span = f"at least {low}" if high == math.inf else f"from {low} to {high:.0f}"
        raise ValueError(f"{name} is {value!r}: give a whole number, {span}")


def number(name: str, text: str) -> float:
    """A number typed as text (``3.5e-6``), since float widgets round. Raises ``ValueError`` naming the input."""
    try:
        return float(str(text).strip().replace(",", "."))
    except ValueError:
        raise ValueError(f"{name} is {text!r}: give a number, such as 3.5e-6") from None


def check(function: Callable[..., object], *values: object) -> bool | str:
    """For ``validate_inputs``: True, or the line of the ``ValueError`` that ``function(*values)`` raises.

    A ``validate_inputs`` takes one input: ComfyUI (0.3.64 to 0.33.0) repeats what it answers at every input that it
    takes. What is wrong with another one is told when the node runs.
    """
    try:
        function(*values)
    except ValueError as error:
        return str(error)
    return True

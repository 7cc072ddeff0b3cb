"""What a run is made of: frozen settings, checked once, kept as JSON without loss.

Every field says its unit and what it does; every check raises ``ValueError`` with one line that
names the field, the value and what to do. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .config_dataset import ALPHAS as ALPHAS
from .config_dataset import ANIMATIONS as ANIMATIONS
from .config_dataset import CAPTION_LINES as CAPTION_LINES
from .config_dataset import CROPS as CROPS
from .config_dataset import MISSING_CAPTIONS as MISSING_CAPTIONS
from .config_dataset import DatasetConfig as DatasetConfig
from .settings import number, one_of, require, whole

FORMAT_VERSION = 1
"""Version of ``config.json`` and of the run directory that holds it."""

OPTIMIZERS = ("nadam", "adan")
STATE_FORMATS = ("log16", "f24", "f32", "u16pow", "bf16", "int8")
WEIGHT_PRECISIONS = ("split", "stochastic", "nearest", "f32")
TIMESTEP_SAMPLINGS = ("flux_shift", "shift", "sigmoid", "uniform")
LOSSES = ("l2", "huber", "smooth_l1")
LR_SCHEDULES = ("constant", "cosine", "linear")
BAD_NUMBERS = ("stop", "roll back")
OUT_OF_MEMORY = ("go on", "roll back")
AUTO = -1
"""Stands for "decide for me" where a number is asked for."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A LoRA that is merged into the weights before training."""

    path: str
    """Path of the LoRA (.safetensors)."""
    strength: float = 1.0
    """Factor of its change; negative takes it away."""

    def __post_init__(self) -> None:
        require(bool(self.path), "lora is empty: choose a LoRA .safetensors file")
        number("lora strength", self.strength, -100.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The files that make up a Flux."""

    flux: str
    """Path of the Flux weights (.safetensors: bf16, f16 or f32; or a folder of a diffusers transformer)."""
    clip_l: str = ""
    """Path of the CLIP-L text encoder; empty where a link supplies it."""
    t5: str = ""
    """Path of the T5-XXL text encoder; empty where a link supplies it."""
    vae: str = ""
    """Path of the VAE; empty where a link supplies it."""
    loras: tuple[LoraConfig, ...] = ()
    """Merged into the Flux weights, one after the other, when a run begins."""

    def __post_init__(self) -> None:
        require(bool(self.flux), "flux model is empty: choose a Flux .safetensors file")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule, and how its states and the weights are kept."""

    kind: str = "nadam"
    """``nadam`` (Adam, AdamW, NAdam and NAdamW, by the switches below) or ``adan``."""
    lr: float = 3.5e-6
    """Learning rate at its peak. The method's author uses 3.5e-6 for NAdam and 3.3e-5 for Adan."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay per step of the moments: two for NAdam, three for Adan (0.98, 0.92, 0.99)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decay of the weights towards zero (decoupled: times the learning rate)."""
    nesterov: bool = True
    """Look ahead one step (NAdam) or not (Adam). Ignored by Adan."""
    decoupled_decay: bool = True
    """Decay the weights (AdamW, NAdamW) or add the decay to the gradient (Adam, NAdam). Ignored by Adan."""
    cautious: bool = True
    """Leave out what disagrees in sign with the gradient (arXiv 2411.16085). Ignored by Adan."""
    no_prox: bool = False
    """Adan only: decay the weights before the update rather than by the proximal step after it."""
    state_format: str = "log16"
    """How the moments are stored in host memory: ``log16`` (2 bytes each), ``f24`` (3), ``f32`` (4), ``u16pow`` (2, the
    prototype's older code), ``bf16`` (2) or ``int8`` (1)."""
    weight_precision: str = "split"
    """``split``: bf16 weights with an exact float32 master (2 bytes more in host memory); ``stochastic``: bf16 weights
    rounded at random; ``nearest``: plainly rounded (small steps are lost); ``f32``: float32 weights (small models)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        one_of("optimizer kind", self.kind, OPTIMIZERS)
        number("learning rate", self.lr, 0.0, 1.0)
        count = 2 if self.kind == "nadam" else 3
        require(len(self.betas) == count, f"betas is {self.betas}: {self.kind} takes {count} numbers")
        for beta in self.betas:
            number("betas", beta, 0.0)
            require(beta < 1, f"betas has {beta}: give numbers below 1")
        number("eps", self.eps, 0.0, 1.0, above=True)
        number("weight decay", self.weight_decay, 0.0, 1e4)
        one_of("state format", self.state_format, STATE_FORMATS)
        one_of("weight precision", self.weight_precision, WEIGHT_PRECISIONS)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Where things live while training."""

    device: str = "auto"
    """``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``."""
    blocks_to_swap: int = AUTO
    """How many transformer blocks live in host memory between uses; -1: as few as fit."""
    activation_offload: str = "auto"
    """Keep the blocks' inputs in host memory during the forward pass: ``on``, ``off`` or ``auto``."""
    micro_batch: int = 0
    """Pictures that pass a block at once; 0: the whole batch. The gradient is the same either way."""
    reserve_vram_gb: float = 1.0
    """GiB of VRAM to leave free for the desktop and other programs."""

    def __post_init__(self) -> None:
        ok = self.device in ("auto", "cpu", "cuda") or (self.device.startswith("cuda:") and self.device[5:].isdigit())
        require(ok, f"device is {self.device!r}: give auto, cpu, cuda or cuda:N")
        whole("blocks_to_swap", self.blocks_to_swap, AUTO, 1000)
        one_of("activation_offload", self.activation_offload, ("auto", "on", "off"))
        whole("micro_batch", self.micro_batch, 0, 1024)
        number("reserve_vram_gb", self.reserve_vram_gb, 0.0, 1024.0)


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What is asked of the model at each step, and how fast it may change."""

    batch_size: int = 5
    """Pictures per update."""
    timestep_sampling: str = "flux_shift"
    """Which noise levels are trained: ``flux_shift`` (logit-normal, shifted by resolution as Flux samples),
    ``shift`` (logit-normal, shifted by ``shift``), ``sigmoid`` (logit-normal) or ``uniform``."""
    shift: float = 3.0
    """Shift of the noise levels under ``shift``: above 1 trains noisier pictures."""
    loss: str = "l2"
    """``l2``, ``huber`` or ``smooth_l1`` between predicted and true velocity."""
    huber_delta: float = 0.1
    """Error above which ``huber`` and ``smooth_l1`` grow linearly."""
    guidance: float = 1.0
    """The guidance value that a guidance-distilled model (dev) is told while it trains."""
    lr_schedule: str = "constant"
    """``constant``, ``cosine`` or ``linear`` (both decay to ``lr_floor`` over ``schedule_steps``, then stay)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""
    schedule_steps: int = 0
    """Step at which a decaying schedule ends. It is no target: training may go on beyond it."""
    lr_floor: float = 0.0
    """Share of the peak learning rate at which a decaying schedule stays."""
    caption_dropout: float = 0.0
    """Share of the samples trained with an empty caption."""
    training_seed: int = 0
    """Seed of noise, noise levels, order and dropout."""
    save_every_steps: int = 0
    """A save point every so many steps; 0: only by time, on stop and at the target."""
    save_every_minutes: float = 60.0
    """A save point every so many minutes of training; 0: never by time."""
    keep_save_points: int = 1
    """How many save points are kept, the newest ones."""
    checkpoint_every_steps: int = 0
    """A weights-only checkpoint (plain bf16) every so many steps; 0: none."""
    keep_checkpoints: int = 0
    """How many of those are kept, the newest ones; 0: all."""
    ema_decay: float = 0.0
    """Decay per step of a running average of the weights, kept in host memory for previews and export; 0: none. The
    first steps decay faster, at most by (1 + step) / (10 + step): a short training is not mostly its beginning."""
    validate_every_steps: int = 100
    """The loss of the validation pictures, where there are any, every so many steps; 0: only at a target."""
    on_bad_numbers: str = "stop"
    """When loss or gradients are not finite: ``stop``, or ``roll back`` to the last save point and go on without
    that batch (three times at most)."""
    on_out_of_memory: str = "go on"
    """When the GPU's memory runs out after some blocks of a step were updated: ``go on`` with the next step, or
    ``roll back`` to the last save point."""

    def __post_init__(self) -> None:
        whole("batch_size", self.batch_size, 1, 1024)
        one_of("timestep_sampling", self.timestep_sampling, TIMESTEP_SAMPLINGS)
        number("shift", self.shift, 0.0, 100.0, above=True)
        one_of("loss", self.loss, LOSSES)
        number("huber_delta", self.huber_delta, 0.0, 100.0, above=True)
        number("guidance", self.guidance, 0.0, 100.0)
        one_of("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        whole("warmup_steps", self.warmup_steps, 0)
        whole("schedule_steps", self.schedule_steps, 0)
        decays = self.lr_schedule != "constant"
        require(
            not decays or self.schedule_steps > self.warmup_steps,
            f"schedule_steps is {self.schedule_steps}: a {self.lr_schedule} schedule needs the step at which it ends,"
            f" above warmup_steps ({self.warmup_steps})",
        )
        number("lr_floor", self.lr_floor, 0.0, 1.0)
        number("caption_dropout", self.caption_dropout, 0.0, 1.0)
        whole("training_seed", self.training_seed, 0, 2**64 - 1)
        whole("save_every_steps", self.save_every_steps, 0)
        number("save_every_minutes", self.save_every_minutes, 0.0)
        whole("keep_save_points", self.keep_save_points, 1, 10_000)
        whole("checkpoint_every_steps", self.checkpoint_every_steps, 0)
        whole("keep_checkpoints", self.keep_checkpoints, 0)
        number("ema_decay", self.ema_decay, 0.0)
        require(self.ema_decay < 1, f"ema_decay is {self.ema_decay}: give a number below 1, such as 0.999, or 0")
        whole("validate_every_steps", self.validate_every_steps, 0)
        one_of("on_bad_numbers", self.on_bad_numbers, BAD_NUMBERS)
        one_of("on_out_of_memory", self.on_out_of_memory, OUT_OF_MEMORY)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run needs, but for its data: ``config.json`` of the run directory."""

    name: str
    """Name of the run and of its directory."""
    model: ModelConfig
    """What is trained, and what encodes for it."""
    dataset: DatasetConfig
    """What it is trained on."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How the weights are updated."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Where things live meanwhile."""
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    """What is asked of the model."""
    format_version: int = FORMAT_VERSION
    """Version of this file's format."""

    def __post_init__(self) -> None:
        check_name(self.name)
        require(
            self.format_version == FORMAT_VERSION,
            f"format_version is {self.format_version}: this program reads {FORMAT_VERSION}; use the one that wrote it",
        )


RESERVED_NAMES = ("cache", "demo")
"""Folders beside the run directories that are no runs."""
_FORBIDDEN = set('<>:"/\\|?*')
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))}


def check_name(name: str) -> str:
    """Return ``name`` if it can name a run directory on every system, else raise ``ValueError``."""
    what = f"run name is {name!r}"
    require(bool(name.strip()), f"{what}: give it a name")
    require(len(name) <= 100, f"{what}: give a name of at most 100 characters")
    bad = sorted(c for c in set(name) if c in _FORBIDDEN or ord(c) < 32)
    require(not bad, f"{what}: leave out {' '.join(map(repr, bad))} (a run name is one folder's name)")
    require(
        name == name.strip() and not name.startswith(".") and not name.endswith("."),
        f"{what}: leave out dots and spaces at its ends",
    )
    require(name.lower() not in RESERVED_NAMES, f"{what}: that folder is taken, choose another name")
    require(name.lower().split(".")[0] not in _WINDOWS_DEVICES, f"{what}: Windows keeps that name for itself")
    return name

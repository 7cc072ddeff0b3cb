"""What people type to find a node: the canvas's search looks at these beside a node's name."""

from __future__ import annotations

from typing import TypeVar

from comfy_api.latest import io

_Node = TypeVar("_Node", bound=type[io.ComfyNode])

FAMILY = ("flux full fine-tune",)
"""Of every node."""
_TRAINING = ("fine-tune", "fine tune", "finetune", "fine-tuning", "finetuning", "full fine-tune", "full finetune",
             "train flux", "train", "training", "trainer", "flux training", "flux trainer", "full training",
             "dreambooth", "checkpoint training", "sd-scripts", "kohya")
"""Of the nodes that a graph is begun with: an exact match is listed before the others' likeness."""

ALIASES: dict[str, tuple[str, ...]] = {
    "FluxFFTModel": (*_TRAINING, "flux model", "base model", "load flux to train", "flux1-dev"),
    "FluxFFTMergeLoRA": ("merge lora", "lora merge", "bake lora", "train on lora"),
    "FluxFFTDataset": (*_TRAINING, "dataset", "training dataset", "image folder", "training images", "load images",
                       "captions", "txt captions", "regularization"),
    "FluxFFTPictureSettings": ("dataset settings", "resolution", "buckets", "bucketing", "crop", "flip", "masks",
                               "augmentation"),
    "FluxFFTCaptionSettings": ("captions", "caption dropout", "tags", "shuffle tags", "trigger word", "wildcards"),
    "FluxFFTOptimizerNAdam": ("optimizer", "nadam", "adam", "adamw", "learning rate", "lr", "8-bit adam", "cautious",
                              "weight decay"),
    "FluxFFTOptimizerAdan": ("optimizer", "adan", "learning rate", "lr"),
    "FluxFFTMemory": ("blocks to swap", "block swap", "vram", "offload", "low vram", "device"),
    "FluxFFTRecipe": ("batch size", "timesteps", "timestep sampling", "loss", "lr scheduler", "warmup", "ema",
                      "training settings", "hyperparameters"),
    "FluxFFTStart": (*_TRAINING, "start training", "new run", "resume training"),
    "FluxFFTOpenRun": ("load run", "open run", "resume training", "continue training", "load training state"),
    "FluxFFTTrainSteps": (*_TRAINING, "train steps", "training loop", "start training", "epochs"),
    "FluxFFTPreviewSettings": ("sample prompts", "training samples", "preview prompts", "validation prompts"),
    "FluxFFTPreview": ("sample run", "training samples", "preview training"),
    "FluxFFTCompare": ("compare checkpoints", "xy plot", "grid", "compare runs"),
    "FluxFFTRunModel": ("trained model", "model from run", "sample weights in training"),
    "FluxFFTLossPlot": ("loss curve", "loss graph", "plot loss", "tensorboard"),
    "FluxFFTExport": ("save checkpoint", "save model", "save trained model", "save safetensors", "extract lora",
                      "export model", "fp8", "lora from difference"),
    "FluxFFTDemo": (*_TRAINING, "demo", "example", "tiny flux", "tutorial"),
    "FluxFFTDoctor": ("check", "diagnose", "benchmark", "troubleshoot", "test gpu"),
}


def findable(node: _Node) -> _Node:
    """The node class, with its aliases where this ComfyUI knows of any (0.33.0; 0.3.64 does not)."""
    define = node.define_schema

    def with_aliases(cls: type[io.ComfyNode]) -> io.Schema:
        schema = define()
        if hasattr(schema, "search_aliases"):
            schema.search_aliases = [*FAMILY, *ALIASES[schema.node_id]]
        return schema

    node.define_schema = classmethod(with_aliases)  # type: ignore[method-assign, assignment]
    return node

"""Full fine-tuning of Flux with Adam-class optimizers whose states live in host memory. Imports nothing of ComfyUI."""

__version__ = "0.1.0"

"""ComfyUI's entry into the pack: the nodes and the folder of the canvas code."""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

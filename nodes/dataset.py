"""The folder of pictures to train on."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer.config import DatasetConfig
from . import bridge, handles


class FluxFFTDataset(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTDataset",
            display_name="Training Pictures",
            category=handles.CATEGORY,
            description="A folder of pictures, each with its caption in a text file of the same name beside it.",
            inputs=[
                io.String.Input("folder", default="",
                                tooltip="Path of the folder of pictures, sub-folders included; a path that is not "
                                        "absolute starts in ComfyUI's input folder. A picture's caption is the .txt "
                                        "file of the same name."),
                io.Int.Input("resolution", default=1024, min=16, max=8192, step=16,
                             tooltip="Side, in pixels, of the square whose area every picture is scaled to. "
                             "Lower it (768, 512) to train faster in less memory."),
                io.String.Input("trigger_word", default="",
                                tooltip="Caption of the pictures that have no text file. Left empty, the words of the "
                                "picture's file name are used. Set it when you train one subject or style."),
                io.Int.Input("bucket_step", default=64, min=16, max=512, step=16,
                             tooltip="Sides of the sizes that pictures are cropped to are multiples of this many "
                                     "pixels. Lower it to crop less; more sizes then share fewer pictures each."),
                io.Boolean.Input("upscale", default=True,
                                 tooltip="Enlarge pictures smaller than the resolution. Turn it off to train small "
                                         "pictures at a smaller size of their own instead."),
            ],
            outputs=[handles.Dataset.Output("dataset", display_name="dataset")],
        )

    @classmethod
    def execute(cls, folder, resolution, trigger_word, bucket_step, upscale) -> io.NodeOutput:
        return io.NodeOutput(DatasetConfig(
            folder=bridge.input_path(folder), resolution=resolution, bucket_step=bucket_step,
            trigger_word=trigger_word.strip(), upscale=upscale))

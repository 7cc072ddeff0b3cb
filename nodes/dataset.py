"""The folder of pictures to train on, and how its pictures and captions are taken.

``fingerprint_inputs`` here follows the folder's files, so that an edited picture or caption is seen when the graph is
queued again: ComfyUI would else answer from its cache. It makes Start and what is behind it run again, which trains
nothing by itself: steps are targets, and a run that has reached its target stays there. Start's own fingerprint stays
the one that follows the run.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..trainer.config import ALPHAS, ANIMATIONS, CAPTION_LINES, CROPS, MISSING_CAPTIONS, DatasetConfig
from ..trainer.data.folders import state_of
from ..trainer.data.report import table
from ..trainer.data.sets import parts_of
from . import bridge, handles, scans

_DEFAULT = DatasetConfig(folder=".")
PICTURE_FIELDS = ("more_resolutions", "crop", "flip", "alpha", "background", "animations", "masks", "outside_mask",
                  "repeats", "weight", "validation_share", "validation_folder")  # fmt: skip
CAPTION_FIELDS = ("fixed_caption", "missing_captions", "caption_prefix", "caption_suffix", "caption_lines",
                  "shuffle_tags", "keep_tags", "tag_dropout", "caption_variants")  # fmt: skip
MOST_LINES = 5
"""Of what is skipped and of warnings, so many of each are shown."""


class FluxFFTDataset(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTDataset",
            display_name="Training Pictures",
            category=handles.CATEGORY,
            description="A folder of pictures, each with its caption in a text file of the same name beside it. Says "
                        "what will be trained on.",
            inputs=[
                io.String.Input("folder", default="",
                                tooltip="Path of the folder of pictures, sub-folders included; a path that is not "
                                        "absolute starts in ComfyUI's input folder. A picture's caption is the .txt, "
                                        ".caption or .json file of the same name, or its row in a metadata.jsonl or "
                                        "captions.csv."),
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
                handles.Pictures.Input("pictures", optional=True,
                                       tooltip="Crop, mirroring, masks, repeats and validation, from Picture "
                                               "Settings. Not connected: centre crop, each picture once."),
                handles.Captions.Input("captions", optional=True,
                                       tooltip="Prefix, tags and what to do without a caption, from Caption Settings. "
                                               "Not connected: captions as they are."),
                handles.Dataset.Input("also", optional=True,
                                      tooltip="Another Training Pictures, whose folder is trained with this one, with "
                                              "settings of its own. Connect several in a row for more folders."),
            ],
            outputs=[handles.Dataset.Output("dataset", display_name="dataset")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, folder=None, **_):
        """Names, sizes and times of the folder's files; nothing is opened. See the module's text."""
        return _state(folder)

    @classmethod
    def execute(cls, folder, resolution, trigger_word, bucket_step, upscale, pictures=None, captions=None,
                also=None) -> io.NodeOutput:  # fmt: skip
        settings = {**_chosen(pictures, PICTURE_FIELDS), **_chosen(captions, CAPTION_FIELDS)}
        config = DatasetConfig(
            folder=bridge.input_path(folder), resolution=resolution, bucket_step=bucket_step,
            trigger_word=trigger_word.strip(), upscale=upscale, **settings, also=(also,) if also else ())
        return io.NodeOutput(config, ui={"text": tuple(_told(config, cls.hidden.unique_id))})


class FluxFFTPictureSettings(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTPictureSettings",
            display_name="Picture Settings",
            category=handles.CATEGORY,
            description="How the pictures of a folder are cropped, mirrored, masked, repeated and set aside. The "
                        "settings shown are the defaults.",
            inputs=[
                io.String.Input("more_resolutions", default="",
                                tooltip="Further resolutions in pixels, with commas between: every picture is trained "
                                        "at each of them too. Write 512, 768 to make the model good at several sizes."),
                io.Combo.Input("crop", options=list(CROPS), default=_DEFAULT.crop,
                               tooltip="What is kept where a picture does not have the shape of its size. centre; top: "
                                       "the upper part of tall ones, for portraits; focus: the part with the most "
                                       "detail."),
                io.Boolean.Input("flip", default=_DEFAULT.flip,
                                 tooltip="Train every picture mirrored half of the time. Turn it on for few pictures; "
                                         "not where left and right matter (faces, text, logos)."),
                io.Combo.Input("alpha", options=list(ALPHAS), default=_DEFAULT.alpha,
                               tooltip="Transparent pixels. background: they get that colour. mask: they get it, "
                                       "and are left out of the loss too, so that the colour is not learned."),
                io.String.Input("background", default=_DEFAULT.background,
                                tooltip="Colour behind transparent pixels, as #rrggbb. Change it when white outlines "
                                        "appear in what you generate."),
                io.Combo.Input("animations", options=list(ANIMATIONS), default=_DEFAULT.animations,
                               tooltip="Animated pictures: train their first frame, with a warning, or skip them."),
                io.Boolean.Input("masks", default=_DEFAULT.masks,
                                 tooltip="Take name.mask.png beside a picture, or masks/name.png, as the mask of its "
                                         "loss: white is learned, black is not. Turn it off to ignore such files."),
                io.Float.Input("outside_mask", default=_DEFAULT.outside_mask, min=0.0, max=1.0, step=0.01,
                               tooltip="How much is learned where a mask is black, against 1 where it is white. Raise "
                                       "it to 0.1 when backgrounds fall apart."),
                io.Int.Input("repeats", default=_DEFAULT.repeats, min=1, max=10_000,
                             tooltip="How often each picture of this folder is seen in an epoch. Raise it for a small "
                                     "folder beside a large one."),
                io.Float.Input("weight", default=_DEFAULT.weight, min=0.01, max=100.0, step=0.01,
                               tooltip="Factor of the loss of these pictures, no unit. Lower it for pictures that "
                                       "should only keep what the model knows."),
                io.Float.Input("validation_share", default=_DEFAULT.validation_share, min=0.0, max=0.5, step=0.01,
                               tooltip="Share of the pictures (0 to 0.5) that is never trained; its loss is measured "
                                       "instead. Set 0.05 to 0.1 to see when the model begins to learn by heart."),
                io.String.Input("validation_folder", default="",
                                tooltip="Folder of pictures to measure, beside or instead of a share. Equal pictures "
                                        "in the training folder are then left out of the training."),
            ],
            outputs=[handles.Pictures.Output("pictures", display_name="pictures")],
        )

    @classmethod
    def fingerprint_inputs(cls, validation_folder=None, **_):
        return _state(validation_folder)

    @classmethod
    def execute(cls, more_resolutions, validation_folder, **settings) -> io.NodeOutput:
        if validation_folder.strip():
            validation_folder = bridge.input_path(validation_folder)
        return io.NodeOutput(DatasetConfig(
            folder=".", bucket_step=16, more_resolutions=_resolutions(more_resolutions),
            validation_folder=validation_folder.strip(), **settings))


class FluxFFTCaptionSettings(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTCaptionSettings",
            display_name="Caption Settings",
            category=handles.CATEGORY,
            description="What is put around the captions of a folder, how their tags change, and what pictures without "
                        "one get. The settings shown are the defaults.",
            inputs=[
                io.String.Input("caption_prefix", default=_DEFAULT.caption_prefix,
                                tooltip="Put before every caption, with a space between. Write your trigger word and a "
                                        "comma here to have it in all captions."),
                io.String.Input("caption_suffix", default=_DEFAULT.caption_suffix,
                                tooltip="Put behind every caption. Write a comma first to add it as a tag."),
                io.Combo.Input("missing_captions", options=list(MISSING_CAPTIONS), default=_DEFAULT.missing_captions,
                               tooltip="Pictures without a caption. trigger or name: the trigger_word of Training "
                                       "Pictures, else the file name's words. fixed: fixed_caption. folder: their "
                                       "folder's name. skip: they are left out. stop: an error names them."),
                io.String.Input("fixed_caption", default=_DEFAULT.fixed_caption, multiline=True,
                                tooltip="One caption for all pictures, whatever lies beside them; with "
                                        "missing_captions 'fixed', for those that have none. Leave it empty to use "
                                        "each picture's own."),
                io.Combo.Input("caption_lines", options=list(CAPTION_LINES), default=_DEFAULT.caption_lines,
                               tooltip="A caption file with several lines. join: they are one caption. random: each "
                                       "line is a caption, and one of them is trained at a time."),
                io.Boolean.Input("shuffle_tags", default=_DEFAULT.shuffle_tags,
                                 tooltip="Train the tags, the parts between commas, in changing orders. Turn it on for "
                                         "tag lists, not for sentences."),
                io.Int.Input("keep_tags", default=_DEFAULT.keep_tags, min=0, max=1000,
                             tooltip="So many tags at the front stay in place when tags are shuffled or left out. Set "
                                     "1 when your trigger word stands first."),
                io.Float.Input("tag_dropout", default=_DEFAULT.tag_dropout, min=0.0, max=1.0, step=0.01,
                               tooltip="Share of the other tags (0 to 1) that is left out at a time. Set 0.1 to make "
                                       "the model less dependent on complete lists."),
                io.Int.Input("caption_variants", default=_DEFAULT.caption_variants, min=1, max=100,
                             tooltip="How many versions of each caption are made and encoded when tags are shuffled or "
                                     "left out. Raise it for more variety; each takes 2 to 4 MB of disk per picture."),
            ],
            outputs=[handles.Captions.Output("captions", display_name="captions")],
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(DatasetConfig(folder=".", **settings))


def _chosen(settings: DatasetConfig | None, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names} if settings is not None else {}


def _state(folder: Any) -> str:
    """Of a folder that is typed; one that comes over a link is not known here."""
    if not isinstance(folder, str) or not folder.strip():
        return ""
    return state_of(bridge.input_path(folder))


def _resolutions(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in str(text).replace(";", ",").replace(",", " ").split())
    except ValueError:
        raise ValueError(f"more_resolutions is {text!r}: give whole numbers with commas between, such as 512, 768"
                         ) from None


def _told(config: DatasetConfig, node_id: str | None) -> list[str]:
    """Lines about the folder; those that are connected speak for themselves. What is wrong is Start's to refuse."""
    bar = bridge.Progress(1, node_id)

    def progress(done: int, total: int) -> None:
        bridge.throw_if_cancelled()
        bar.update(done, total)

    try:
        own = next(iter(parts_of(config))).config
        return table(scans.look(own, progress), most=MOST_LINES)
    except ValueError as error:
        return [str(error)]

"""What is asked of the model at each step."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..trainer.config import BAD_NUMBERS, LOSSES, LR_SCHEDULES, OUT_OF_MEMORY, TIMESTEP_SAMPLINGS, RecipeConfig
from . import handles

_DEFAULT = RecipeConfig()


class FluxFFTRecipe(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTRecipe",
            display_name="Training Recipe",
            category=handles.CATEGORY,
            description="Batch size, noise levels, loss, learning-rate schedule and saving. The settings shown are "
                        "the defaults.",
            inputs=[
                io.Int.Input("batch_size", default=_DEFAULT.batch_size, min=1, max=1024,
                             tooltip="Pictures per step. More make a step steadier and slower and need more memory; "
                                     "lower it when memory is short."),
                io.Combo.Input("timestep_sampling", options=list(TIMESTEP_SAMPLINGS),
                               default=_DEFAULT.timestep_sampling,
                               tooltip="Which noise levels are trained. flux_shift: as Flux itself samples at the "
                                       "picture's size. shift: moved by the shift input. sigmoid: mostly middle "
                                       "levels. uniform: all alike."),
                io.Float.Input("shift", default=_DEFAULT.shift, min=0.01, max=100.0, step=0.01,
                               tooltip="Only for timestep_sampling 'shift': above 1 trains noisier pictures "
                                       "(composition), below 1 cleaner ones (detail). No unit."),
                io.Combo.Input("loss", options=list(LOSSES), default=_DEFAULT.loss,
                               tooltip="How errors count. l2: squared. huber and smooth_l1 count large errors less: "
                                       "choose one when a few odd pictures disturb the training."),
                io.Float.Input("huber_delta", default=_DEFAULT.huber_delta, min=0.0001, max=100.0, step=0.0001,
                               tooltip="Only for huber and smooth_l1: error above which they count less. "
                               "Lower it to ignore odd pictures more."),
                io.Float.Input("guidance", default=_DEFAULT.guidance, min=0.0, max=100.0, step=0.1,
                               tooltip="Guidance value that FLUX.1 dev is told while training; schnell has none. "
                               "Leave 1 and sample with 3.5 as usual, unless you repeat another recipe."),
                io.Combo.Input("lr_schedule", options=list(LR_SCHEDULES), default=_DEFAULT.lr_schedule,
                               tooltip="constant, or a learning rate that falls until schedule_steps (cosine, "
                                       "linear) and then stays. Choose a falling one for a last polish."),
                io.Int.Input("warmup_steps", default=_DEFAULT.warmup_steps, min=0, max=10_000_000,
                             tooltip="Steps over which the learning rate rises from zero. Set 20 to 100 when the "
                                     "first steps disturb the model."),
                io.Int.Input("schedule_steps", default=_DEFAULT.schedule_steps, min=0, max=10_000_000,
                             tooltip="Step at which a falling schedule has come down. Needed for cosine and linear; "
                             "training may go on beyond it."),
                io.Float.Input("lr_floor", default=_DEFAULT.lr_floor, min=0.0, max=1.0, step=0.01,
                               tooltip="Share of the learning rate (0 to 1) at which a falling schedule stays. "
                               "Raise it to keep learning after the schedule."),
                io.Float.Input("caption_dropout", default=_DEFAULT.caption_dropout, min=0.0, max=1.0, step=0.01,
                               tooltip="Share of pictures (0 to 1) trained without their caption. "
                               "Set 0.05 to 0.1 when training a style that should show without being named."),
                io.Int.Input("training_seed", default=_DEFAULT.training_seed, min=0, max=2**53 - 1,
                             tooltip="Number from which noise, order and dropout are made: the same number repeats "
                                     "a training. Change it for another try with equal settings."),
                io.Int.Input("save_every_steps", default=_DEFAULT.save_every_steps, min=0, max=10_000_000,
                             tooltip="Save the whole run (tens of GB for FLUX.1) every so many steps; 0: only by "
                                     "time, on stop and at the end."),
                io.Float.Input("save_every_minutes", default=_DEFAULT.save_every_minutes, min=0.0, max=100000.0,
                               step=1.0,
                               tooltip="Save the whole run every so many minutes, so that a crash costs at most "
                                       "these; 0: never by time. Raise it when saving is slow."),
                io.Int.Input("keep_save_points", optional=True, default=_DEFAULT.keep_save_points, min=1, max=10_000,
                             tooltip="How many save points stay on the disk, the newest ones. Raise it to be able to "
                                     "go back further; each takes tens of GB for FLUX.1."),
                io.Int.Input("checkpoint_every_steps", optional=True, default=_DEFAULT.checkpoint_every_steps, min=0,
                             max=10_000_000,
                             tooltip="Write a plain bf16 checkpoint (24 GB for FLUX.1), which any loader reads, every "
                                     "so many steps; 0: none. Set it to compare stages of the training later."),
                io.Int.Input("keep_checkpoints", optional=True, default=_DEFAULT.keep_checkpoints, min=0, max=10_000,
                             tooltip="How many of those checkpoints stay, the newest ones; 0: all. Set it when the "
                                     "disk is small."),
                # Text, since float widgets round: 0.999 could become 1.00.
                io.String.Input("ema_decay", optional=True, default="0",
                                tooltip="Also keep a running average of the weights, in RAM (2 bytes a weight), for "
                                        "previews and export; the share of it kept at each step. 0: none. Set 0.99 to "
                                        "0.999 when previews of neighbouring steps differ much."),
                io.Int.Input("validate_every_steps", optional=True, default=_DEFAULT.validate_every_steps, min=0,
                             max=10_000_000,
                             tooltip="Measure the loss of the pictures set aside for validation every so many steps; "
                                     "0: only at a target. It needs such pictures in Training Pictures."),
                io.Combo.Input("on_bad_numbers", optional=True, options=list(BAD_NUMBERS),
                               default=_DEFAULT.on_bad_numbers,
                               tooltip="When a loss is no number. stop: the training ends with an error that names the "
                                       "pictures. roll back: go on from the last save point without them, three times "
                                       "at most. Choose that for nights."),
                io.Combo.Input("on_out_of_memory", optional=True, options=list(OUT_OF_MEMORY),
                               default=_DEFAULT.on_out_of_memory,
                               tooltip="When the GPU's memory runs out in the middle of a step. go on: take the half "
                                       "step and train on with more in RAM. roll back: the same from the last save "
                                       "point. Choose that where every step must be whole."),
            ],
            outputs=[handles.Recipe.Output("recipe", display_name="recipe")],
        )

    @classmethod
    def validate_inputs(cls, ema_decay=None):
        return True if ema_decay is None else handles.check(_average, ema_decay)  # None: linked, checked when it runs

    @classmethod
    def execute(cls, ema_decay="0", **settings) -> io.NodeOutput:
        return io.NodeOutput(_average(ema_decay, **settings))


def _average(ema_decay: str, **settings: Any) -> RecipeConfig:
    return RecipeConfig(ema_decay=handles.number("ema_decay", ema_decay), **settings)

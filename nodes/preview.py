"""Pictures of the weights in training: the settings, and one look at one point of the graph."""

from __future__ import annotations

from comfy_api.latest import io

from . import bridge, bridge_model, handles, pictures, registry, words


class FluxFFTPreviewSettings(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        samplers, schedulers = bridge_model.samplers()
        return io.Schema(
            node_id="FluxFFTPreviewSettings",
            display_name="Preview Settings",
            category=handles.CATEGORY,
            description="Which pictures are sampled from the weights in training, and how often.",
            inputs=[
                io.String.Input("prompts", default="", multiline=True,
                                tooltip="What to sample, one prompt on each line. Choose some like your captions "
                                        "and some unlike them, to see what is learned and what is forgotten."),
                io.Int.Input("width", default=1024, min=16, max=8192, step=16,
                             tooltip="Width of the pictures in pixels. Lower it to preview faster."),
                io.Int.Input("height", default=1024, min=16, max=8192, step=16,
                             tooltip="Height of the pictures in pixels. Lower it to preview faster."),
                io.Combo.Input("sampler_name", options=samplers, default="euler",
                               tooltip="ComfyUI's sampler. Choose the one that you will use the model with."),
                io.Combo.Input("scheduler", options=schedulers, default="simple",
                               tooltip="ComfyUI's schedule of noise levels. Choose the one that you will use the "
                                       "model with."),
                io.Int.Input("sampling_steps", default=20, min=1, max=1000,
                             tooltip="Sampler steps per picture. Lower it to preview faster; 4 is enough for schnell."),
                io.Float.Input("guidance", default=3.5, min=0.0, max=100.0, step=0.1,
                               tooltip="Guidance value for FLUX.1 dev and Krea; schnell has none. "
                               "Lower it when pictures look overdone."),
                io.Float.Input("cfg", default=1.0, min=0.0, max=100.0, step=0.1,
                               tooltip="Classifier-free guidance against an empty prompt; 1: off, as Flux is used. "
                               "Other values take twice as long."),
                io.Int.Input("preview_seed", default=0, min=0, max=2**53 - 1,
                             tooltip="Number from which the noise of every picture is made. Leave it as it is, so "
                                     "that pictures of different steps can be compared."),
                io.Int.Input("every_n_steps", default=250, min=0, max=10_000_000,
                             tooltip="Train Steps samples at every multiple of this many steps; 0: only Preview "
                                     "nodes do. Lower it to see more, raise it to train with fewer breaks."),
                io.Boolean.Input("average", default=False, optional=True,
                                 tooltip="Sample the running average of the weights, which Training Recipe's ema_decay "
                                         "keeps. Turn it on to see what an export of the average would give."),
            ],
            outputs=[handles.Previews.Output("previews", display_name="previews")],
        )

    @classmethod
    def execute(cls, prompts, width, height, sampler_name, scheduler, sampling_steps, guidance, cfg, preview_seed,
                every_n_steps, average=False) -> io.NodeOutput:
        samplers, schedulers = bridge_model.samplers()
        for name, value, choices in (("sampler_name", sampler_name, samplers), ("scheduler", scheduler, schedulers)):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}: this ComfyUI does not have it, choose another")
        return io.NodeOutput(handles.PreviewSettings(
            prompts=tuple(words.lines(prompts)), width=width, height=height, sampler=sampler_name, scheduler=scheduler,
            sampling_steps=sampling_steps, guidance=guidance, cfg=cfg, preview_seed=preview_seed,
            every_n_steps=every_n_steps, average=bool(average)))


class FluxFFTPreview(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTPreview",
            display_name="Preview the Run",
            category=handles.CATEGORY,
            description="Samples the pictures of Preview Settings at this point of the graph. Once the run has been "
                        "trained further, the pictures that were kept at this step are shown again.",
            inputs=[
                handles.Run.Input("run", tooltip="The run, from Train Steps, Start or Open a Run."),
                handles.Previews.Input("previews", tooltip="What to sample, from Preview Settings. Its "
                                                           "every_n_steps plays no part here."),
            ],
            outputs=[handles.Run.Output("run_out", display_name="run"),
                     io.Image.Output("images", display_name="images")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, run, previews) -> io.NodeOutput:
        directory = registry.open_directory(run)
        with pictures.Sampler(directory, previews, saved=run.saved) as sampler:
            paths = sampler.recorded(run.step)
            said = "shown again"
            if paths is None:
                if not run.saved:
                    registry.require_step(directory, run.step, "no pictures with these settings were kept at that step")
                sampler.encode_prompts()
                paths = sampler.take(run.step)
                said = "sampled"
        text = f"{words.count(len(paths), 'picture')} of run {run.name!r} at step {run.step}, {said}"
        return io.NodeOutput(run, pictures.as_images(paths),
                             ui={"text": (text,), "images": [bridge.ui_image(p) for p in paths]})

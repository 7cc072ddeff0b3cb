"""Start a run, and train it to a target."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer.config import MemoryConfig, OptimizerConfig, RecipeConfig, RunConfig, check_name
from . import handles, registry, start, training


class FluxFFTStart(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTStart",
            display_name="Start or Continue a Run",
            category=handles.CATEGORY,
            description="Reads the pictures, encodes what is new and makes the run's folder, or finds the run that "
                        "is there. It trains nothing: connect Train Steps.",
            inputs=[
                handles.Model.Input("model", tooltip="The Flux to train, from Flux Model to Train or the demo."),
                handles.Dataset.Input("dataset", tooltip="The pictures to train on, from Training Pictures or the "
                                                         "demo."),
                io.String.Input("run_name", default="my_flux",
                                tooltip="Name of the run and of its folder below output/flux_fft. An existing run "
                                        "of this name is continued; change the name to begin another."),
                io.Combo.Input("if_different", options=list(start.CHOICES), default=start.STOP,
                               tooltip="What to do if a run of this name has another model, dataset or optimizer. "
                                       f"'{start.CONTINUE}' keeps its weights and kind of optimizer and takes the "
                                       f"rest from this graph; '{start.FRESH}' keeps its weights and takes this "
                                       "graph's optimizer, which begins without memory of earlier steps; "
                                       f"'{start.NEXT_NAME}' begins or finds name_2, name_3 and so on."),
                handles.Optimizer.Input("optimizer", optional=True,
                                        tooltip="How weights are changed. Not connected: NAdam at 3.5e-6."),
                handles.Memory.Input("memory", optional=True,
                                     tooltip="Device and what waits in RAM. Not connected: decided automatically. "
                                     "Connect it when memory is short."),
                handles.Recipe.Input("recipe", optional=True,
                                     tooltip="Batch size, noise levels, loss and saving. Not connected: batch 5 and "
                                             "the defaults."),
            ],
            outputs=[handles.Run.Output("run", display_name="run")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, run_name=None):
        return True if run_name is None else handles.check(check_name, run_name)

    @classmethod
    def fingerprint_inputs(cls, run_name=None, if_different=None, **_):
        """Never the step: training must not run Start, and all after it, again. Rolling back or deleting must."""
        return [run_name, if_different, registry.generation(run_name) if run_name else 0]

    @classmethod
    def execute(cls, model, dataset, run_name, if_different, optimizer=None, memory=None, recipe=None) -> io.NodeOutput:
        if if_different not in start.CHOICES:
            raise ValueError(f"if_different is {if_different!r}: choose one of {', '.join(start.CHOICES)}")
        config = RunConfig(name=run_name, model=model.config, dataset=dataset, optimizer=optimizer or OptimizerConfig(),
                           memory=memory or MemoryConfig(), recipe=recipe or RecipeConfig())
        started = start.start(config, model, if_different, cls.hidden.unique_id)
        return io.NodeOutput(started.handle, ui={"text": tuple(started.lines)})


class FluxFFTTrainSteps(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTTrainSteps",
            display_name="Train Steps",
            category=handles.CATEGORY,
            description="Steps are targets: trains until (step of the run that comes in) + steps. Queue again after "
                        "Cancel to go on to the target; at the target, queueing again trains nothing.",
            inputs=[
                handles.Run.Input("run", tooltip="The run to train, from Start, Open a Run or an earlier Train Steps."),
                io.Int.Input("steps", default=500, min=1, max=10_000_000,
                             tooltip="A target: trains until (step of the run that comes in) + steps. Start comes "
                                     "in at step 0. Raise 500 to 800 and queue again to train 300 more."),
                handles.Previews.Input("previews", optional=True,
                                       tooltip="Pictures to sample every so many steps while training. Connect "
                                               "Preview Settings to watch the model learn."),
                io.AnyType.Input("after", optional=True,
                                 tooltip="Anything that has to be done before this training starts. Connect the "
                                         "output of a sampler that uses the run's MODEL at its earlier step."),
            ],
            outputs=[handles.Run.Output("run_out", display_name="run")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, run, steps, previews=None, after=None) -> io.NodeOutput:
        handles.whole("steps", steps, 1)
        workflow = (cls.hidden.extra_pnginfo or {}).get("workflow")
        done = training.train(run, steps, previews, node_id=cls.hidden.unique_id, graph=cls.hidden.prompt,
                              workflow=workflow)
        return io.NodeOutput(done.handle, ui={"text": tuple(done.lines), "images": done.images})

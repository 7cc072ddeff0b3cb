"""A checkpoint or a LoRA for ComfyUI's own loaders."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from comfy_api.latest import io

from ..trainer.header import read_header
from . import bridge, handles, registry

DTYPES = ("bf16", "f16", "f32", "fp8")
TEXTS = ("trigger", "captions")
"""What ``include_texts`` adds to the metadata; paths stay out of it in any case."""


class FluxFFTExport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTExport",
            display_name="Export Checkpoint",
            category=handles.CATEGORY,
            description="Writes the weights of the run as one file: into models/diffusion_models for Load Diffusion "
                        "Model, all in one into models/checkpoints for Load Checkpoint, or what training has changed "
                        "as a LoRA into models/loras. The file is read back and compared; the recipe goes into its "
                        "metadata.",
            inputs=[
                handles.Run.Input("run", tooltip="The run to export, from Train Steps, Start or Open a Run."),
                io.String.Input("filename", default="{run}_{step}",
                                tooltip="Name of the file, below the models folder it belongs to; {run}, {step} and "
                                        "{dtype} stand for the run's name, the step and the dtype. Change it when "
                                        "that name is taken."),
                io.Combo.Input("dtype", options=list(DTYPES), default="bf16",
                               tooltip="bf16: 24 GB for FLUX.1, right for use. fp8: 12 GB, scaled for each matrix, "
                                       "for GPUs with little memory. f32: 48 GB and exact, to compare or train "
                                       "further elsewhere. f16: 24 GB, for programs that cannot read bf16."),
                io.Boolean.Input("overwrite", default=False,
                                 tooltip="Replace a file of that name. Leave it off to be stopped instead; the old "
                                         "file stays whole until the new one is."),
                io.Int.Input("lora_rank", default=0, min=0, max=4096, optional=True,
                             tooltip="0: the whole model. Otherwise a LoRA of this rank is made of the difference to "
                                     "the model that the run began with: small enough to share, but it keeps only "
                                     "part of the training; the node says how much. Raise the rank to keep more."),
                io.Boolean.Input("average", default=False, optional=True,
                                 tooltip="Export the running average of the weights instead, which is often smoother. "
                                         "The recipe's ema_decay must have been above 0 while training."),
                io.Int.Input("from_step", default=0, min=0, max=10_000_000, optional=True,
                             tooltip="0: the run as it is at this point of the graph. Otherwise the step of a save "
                                     "point or checkpoint that the run has kept."),
                io.Boolean.Input("all_in_one", default=False, optional=True,
                                 tooltip="Put the text encoders and the VAE of Flux Model to Train into the file too, "
                                         "as they are: 10 GB more. Load it with Load Checkpoint."),
                io.Boolean.Input("include_texts", default=False, optional=True,
                                 tooltip="Write the trigger word and the texts of the caption settings into the "
                                         "metadata too. Leave it off to share a file without them; paths are never "
                                         "in it."),
            ],
            outputs=[handles.Run.Output("run_out", display_name="run"), io.String.Output("path", display_name="path")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, run, filename, dtype, overwrite, lora_rank=0, average=False, from_step=0, all_in_one=False,
                include_texts=False) -> io.NodeOutput:
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
        handles.whole("lora_rank", lora_rank, 0, 4096)
        handles.whole("from_step", from_step, 0)
        from_step = from_step or (run.step if run.saved else 0)
        directory, step = registry.open_directory(run), from_step or run.step
        options = {"dtype": dtype, "lora_rank": lora_rank, "ema": bool(average), "all_in_one": bool(all_in_one),
                   "include": TEXTS if include_texts else ()}
        name = filename.replace("{run}", run.name).replace("{step}", f"{step:06d}").replace("{dtype}", dtype)
        path = bridge.export_path(name, "loras" if lora_rank else "checkpoints" if all_in_one else "diffusion_models")
        source = {"flux_fft.run": f"{run.uid}.{directory.rollbacks}", "flux_fft.export": json.dumps(options)}
        if path.exists() and not overwrite:
            if _is_this(path, source, step):
                return _done(run, path, f"{path.name} is there already, of this step and dtype")
            raise ValueError(f"filename is {filename!r}: {path} exists; choose another name or turn overwrite on")
        if not from_step:
            registry.require_step(directory, run.step, "its weights of that step are gone")
        client = registry.cancellable(registry.client, run.name)
        done = _export(client, cls.hidden.unique_id, str(path), metadata=source, overwrite=overwrite,
                       from_step=from_step, **options)
        return _done(run, path, f"Wrote {path} ({done['text']})")


def _export(client: Any, node_id: str | None, path: str, **options: Any) -> dict[str, Any]:
    """Have the worker export, its progress shown on the node; on Cancel it leaves off."""
    bar = bridge.Progress(1, node_id)

    def show() -> None:
        now = registry.cancellable(client.status, since=1 << 53).get("exporting")
        if now:
            bar.update(now["done"], max(now["total"], 1))

    try:
        return registry.cancellable(client.export, path, meanwhile=show, **options)
    except BaseException:
        # In a thread: it has ended, or it is Cancel, and that does not wait.
        threading.Thread(target=_leave_off, args=(client,), daemon=True).start()
        raise


def _leave_off(client: Any) -> None:
    with contextlib.suppress(Exception):  # a worker that is gone exports nothing
        client.cancel_export()


def _done(run: handles.RunHandle, path: object, line: str) -> io.NodeOutput:
    return io.NodeOutput(run, str(path), ui={"text": (line,)})


def _is_this(path, source: dict[str, str], step: int) -> bool:
    """Whether the file is this very export, as when a finished graph is queued again."""
    try:
        about = read_header(path).metadata
    except (ValueError, OSError):
        return False
    wanted = {**source, "flux_fft.steps": str(step)}
    return all(about.get(name) == value for name, value in wanted.items())

"""A checkpoint for ComfyUI's own loaders."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer.header import read_header
from . import bridge, handles, registry

DTYPES = ("bf16", "f16", "f32")


class FluxFFTExport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTExport",
            display_name="Export Checkpoint",
            category=handles.CATEGORY,
            description="Writes the weights of the run as one file into models/diffusion_models, for Load Diffusion "
                        "Model. The recipe goes into its metadata.",
            inputs=[
                handles.Run.Input("run", tooltip="The run to export, from Train Steps, Start or Open a Run."),
                io.String.Input("filename", default="{run}_{step}",
                                tooltip="Name of the file, below models/diffusion_models; {run} and {step} stand "
                                        "for the run's name and step. Change it when that name is taken."),
                io.Combo.Input("dtype", options=list(DTYPES), default="bf16",
                               tooltip="bf16: 24 GB for FLUX.1, right for use. f32: 48 GB and exact, to compare or "
                                       "train further elsewhere. f16: 24 GB, for programs that cannot read bf16."),
                io.Boolean.Input("overwrite", default=False,
                                 tooltip="Replace a file of that name. Leave it off to be stopped instead; the old "
                                         "file stays whole until the new one is."),
            ],
            outputs=[handles.Run.Output("run_out", display_name="run"), io.String.Output("path", display_name="path")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, run, filename, dtype, overwrite) -> io.NodeOutput:
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: choose one of {', '.join(DTYPES)}")
        directory = registry.open_directory(run)
        path = bridge.export_path(filename.replace("{run}", run.name).replace("{step}", f"{run.step:06d}"))
        source = f"{run.uid}.{directory.rollbacks}"
        if path.exists() and not overwrite:
            if _is_this(path, source, run.step, dtype):
                return _done(run, path, f"{path.name} is there already, of this step and dtype")
            raise ValueError(f"filename is {filename!r}: {path} exists; choose another name or turn overwrite on")
        registry.require_step(directory, run.step, "its weights of that step are gone")
        client = registry.cancellable(registry.client, run.name)
        registry.cancellable(client.export, str(path), dtype, {"flux_fft.run": source}, overwrite=overwrite)
        return _done(run, path, f"Wrote {path} ({path.stat().st_size / 1e6:,.1f} MB, {dtype}, step {run.step})")


def _done(run: handles.RunHandle, path: object, line: str) -> io.NodeOutput:
    return io.NodeOutput(run, str(path), ui={"text": (line,)})


def _is_this(path, source: str, step: int, dtype: str) -> bool:
    """Whether the file is this very export, as when a finished graph is queued again."""
    try:
        about = read_header(path).metadata
    except (ValueError, OSError):
        return False
    wanted = {"flux_fft.run": source, "flux_fft.steps": str(step), "flux_fft.dtype": dtype}
    return all(about.get(name) == value for name, value in wanted.items())

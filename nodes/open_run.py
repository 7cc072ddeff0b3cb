"""A handle to a run as it is."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer.config import check_name
from ..trainer.run import RunDirectory, find_runs, identity
from . import bridge, handles


class FluxFFTOpenRun(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTOpenRun",
            display_name="Open a Run",
            category=handles.CATEGORY,
            description="A run as it is now, to preview, plot or export it without describing it again. It trains "
                        "nothing by itself.",
            inputs=[
                io.Combo.Input("run_name", options=_names(),
                               tooltip="Name of the run, as its folder below output/flux_fft is called. "
                               "Press R to refresh the list after a new run was made."),
            ],
            outputs=[handles.Run.Output("run", display_name="run")],
        )

    @classmethod
    def validate_inputs(cls, run_name=None):
        # Names an input, which turns off the check against the list: a run may be newer than that.
        return True if run_name is None else handles.check(_open, run_name)

    @classmethod
    def fingerprint_inputs(cls, run_name=None):
        """The run as it is: without the step a stale handle would come from the cache after more training."""
        if not run_name:
            return ""
        try:
            return [identity(bridge.run_dir(run_name)), _open(run_name).status()["resume_step"]]
        except ValueError:
            return ""

    @classmethod
    def execute(cls, run_name) -> io.NodeOutput:
        run = _open(run_name)
        status = run.status()
        handle = handles.RunHandle(name=run.name, uid=run.uid, step=status["resume_step"])
        return io.NodeOutput(handle, ui={"text": (f"Run {run.name!r}: {status['state']}, step {handle.step}",)})


def _names() -> list[str]:
    home = bridge.home()
    if not home.is_dir():
        return []
    return [r.name for r in sorted(find_runs(home), key=lambda r: r.log.path.stat().st_mtime, reverse=True)]


def _open(name: str) -> RunDirectory:
    try:
        return RunDirectory(bridge.home() / check_name(name))
    except ValueError as error:
        raise ValueError(f"run_name: {error}") from None

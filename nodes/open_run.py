"""A handle to a run as it is."""

from __future__ import annotations

from comfy_api.latest import io

from ..trainer.config import check_name
from ..trainer.run import RunDirectory
from ..trainer.runs import find_runs, identity
from ..trainer.saves.saved import kept_at
from . import bridge, handles

LATEST = "latest"


class FluxFFTOpenRun(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxFFTOpenRun",
            display_name="Open a Run",
            category=handles.CATEGORY,
            description="A run as it is now, or as it was where it kept itself, to preview, plot or export it "
                        "without describing it again. It trains nothing by itself.",
            inputs=[
                io.Combo.Input("run_name", options=_names(),
                               tooltip="Name of the run, as its folder below output/flux_fft is called. "
                               "Press R to refresh the list after a new run was made."),
                io.String.Input("at", default=LATEST, optional=True,
                                tooltip="latest: the run as it is. Or the step of a save point or checkpoint that it "
                                        "has kept, to preview or export that: ComfyUI loads it like any model, beside "
                                        "the run. Raise keep_save_points to have more of them."),
            ],
            outputs=[handles.Run.Output("run", display_name="run")],
        )

    @classmethod
    def validate_inputs(cls, run_name=None):
        # Names an input, which turns off the check against the list: a run may be newer than that.
        return True if run_name is None else handles.check(_open, run_name)

    @classmethod
    def fingerprint_inputs(cls, run_name=None, at=LATEST):
        """The run as it is: without the step a stale handle would come from the cache after more training."""
        if not run_name:
            return ""
        try:
            return [identity(bridge.run_dir(run_name)), _handle(run_name, at).step]
        except ValueError:
            return ""

    @classmethod
    def execute(cls, run_name, at=LATEST) -> io.NodeOutput:
        handle = _handle(run_name, at)
        run = _open(run_name)
        what = f"kept at step {handle.step}" if handle.saved else f"{run.status()['state']}, step {handle.step}"
        return io.NodeOutput(handle, ui={"text": (f"Run {run.name!r}: {what}",)})


def _handle(name: str, at: str) -> handles.RunHandle:
    run, text = _open(name), str(at).strip().lower() or LATEST
    if text == LATEST:
        return handles.RunHandle(name=run.name, uid=run.uid, step=run.status()["resume_step"])
    if not text.isdigit():
        raise ValueError(f"at is {at!r}: give {LATEST}, or the step of a save point or checkpoint")
    try:
        return handles.RunHandle(name=run.name, uid=run.uid, step=kept_at(run, int(text)).step, saved=True)
    except ValueError as error:
        raise ValueError(f"at is {at!r}: {error}") from None


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

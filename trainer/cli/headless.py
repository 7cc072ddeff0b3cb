"""``python -m trainer train``: a run trained from a terminal, as a graph would train it."""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path
from typing import Any

from .. import files
from ..client import open_run
from ..compare import relocate
from ..config import RunConfig
from ..data.manifest import cache_path_for, cache_root, check_manifest
from ..launch import LOG_FORMAT
from ..progress import Bar, training_text
from ..protocol import ON_THE_WAY
from ..run import MAY_CHANGE, REFUSE, RunDirectory, RunLocked
from ..settings import from_dict
from ..worker import Worker

log = logging.getLogger(__name__)
SIGNALLED = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
"""Exit codes of a run that a signal stopped, as shells have them."""


def train(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Train until ``args.until``; exit code and the run's last status. ``ValueError`` if that cannot be begun."""
    run = (from_config_file(Path(args.config), args.run_dir, fresh=args.fresh_moments) if args.config
           else RunDirectory(args.run_dir))
    bar = Bar(args.until)
    if run.worker_alive():
        bar.say(f"run {run.name!r} is open in a worker already: it trains there")
        return _follow(run, args.until, bar)
    at = run.status()["resume_step"]
    if at >= args.until:
        bar.say(f"run {run.name!r} is at step {at} already: nothing to train until {args.until}")
        return 0, run.status()
    return _here(run, args, bar)


def _here(run: RunDirectory, args: argparse.Namespace, bar: Bar) -> tuple[int, dict[str, Any]]:
    """The engine in this process, which answers clients like any worker."""
    words = logging.FileHandler(run.log_file, encoding="utf-8", delay=True)
    words.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    before = [(each, each.level) for each in (root, *root.handlers)]
    for terminal in root.handlers:  # the bar speaks there
        terminal.setLevel(logging.CRITICAL)
    root.addHandler(words)
    root.setLevel(logging.INFO)
    try:
        worker = Worker(run, foreground=True, until=args.until, save_every=args.save_every,
                        watch=lambda event: _show(bar, event, run))
        code = worker.serve()
    except RunLocked:
        raise
    except BaseException:
        log.exception("training ended")
        raise
    finally:
        root.removeHandler(words)
        for each, level in before:
            each.setLevel(level)
        words.close()
        bar.close()
    status = run.status()
    if status["state"] == "failed":
        return code or 2, status
    return (0 if status["step"] >= args.until else SIGNALLED.get(worker.quitting, 1)), status


def _follow(run: RunDirectory, until: int, bar: Bar) -> tuple[int, dict[str, Any]]:
    """Have the worker that is there train, and watch it."""
    with open_run(run.path, launch=False, say=bar.say) as client:
        status = client.status()
        seen = status["last_event"]
        try:
            client.let_sample(say=bar.say)
        except KeyboardInterrupt:
            return 130, run.status()  # what trains is another program's, of which nothing was asked yet
        try:
            client.train(until)
            patience = time.monotonic() + ON_THE_WAY
            while True:
                status = client.status(since=seen, wait=2.0)
                for event in status["events"]:
                    seen = event["n"]
                    _show(bar, event, run)
                if status["events"] or status["state"] in ("preparing", "training"):
                    patience = time.monotonic() + ON_THE_WAY
                elif status["state"] != "paused" or status["on_the_way"] is None or status["step"] >= until:
                    break
                elif time.monotonic() > patience and status["worker"] == "idle":
                    client.train(until)  # whoever asked for the pause has gone
        except KeyboardInterrupt:
            bar.say("stopping: the step is finished and saved")
            client.stop()
            return 130, run.status()
        finally:
            bar.close()
    return (0 if status["step"] >= until else 1), status


def _show(bar: Bar, event: dict[str, Any], run: RunDirectory) -> None:
    if event["type"] == "step":
        with run.log.changed:
            summary = run.log.history().summary()
        bar.update(event["step"], training_text(summary))
    elif (line := _line(event)) is not None:
        bar.say(line)


def _line(event: dict[str, Any]) -> str | None:
    """What a terminal is told of an event; None: nothing."""
    kind, step = event["type"], event.get("step")
    if kind in ("eval", "validated"):
        what = "loss at fixed noise" if kind == "eval" else "loss of the validation pictures"
        return f"step {step}: {what} {_loss(event['loss'])}"
    if kind == "spike":
        return f"step {step}: the loss jumped to {_loss(event['loss'])}, usual is {_loss(event['usual'])}"
    if kind == "out_of_memory":
        return (f"out of GPU memory at step {step}: {event['updated']} of {event['stages']} parts of the model were"
                " updated; going on with less on the GPU")
    if kind == "rolled_back":
        why = f" ({event['why']})" if event.get("why") else ""
        left_out = f", without batch {event['skipped']}" if event.get("skipped") else ""
        return f"back at step {step}{why}{left_out}"
    if kind == "state":
        return {"preparing": "loading", "paused": "paused"}.get(event["state"])
    return {
        "resumed": lambda: f"resumed at step {step}" + (", with fresh moments" if event.get("fresh") else ""),
        "saved": lambda: f"saved step {step} in {event['seconds']:.1f} s",
        "save_failed": lambda: f"not saved: {event['error']}",
        "checkpoint": lambda: f"wrote checkpoints/{event['file']}",
        "checkpoint_failed": lambda: f"no checkpoint: {event['error']}",
        "damaged": lambda: f"damaged: {event['error']}",
        "lr": lambda: f"learning rate {event['lr']:g} after step {step}",
    }.get(kind, lambda: None)()


def _loss(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4f}"


def from_config_file(path: Path, run_dir: str | None, *, fresh: bool = False) -> RunDirectory:
    """The run that a settings file describes: made, or found and given its new settings.

    ``fresh``: also settings that it was begun without, another dataset or optimizer, whose moments begin anew then.

    The file holds what ``config.json`` of a run holds, its paths relative to the file's folder, and may add
    ``run_dir`` (else it is given on the command line) and ``dataset_manifest``: the ``dataset.json`` of a run that was
    prepared on the canvas, or the one beside the file. So ``--config OLD/config.json NEW`` begins a run like OLD.
    """
    data = files.read_json(path)
    folder = Path(os.path.abspath(path)).parent
    named, manifest_name = data.pop("run_dir", None), data.pop("dataset_manifest", None)
    if not (run_dir or named):
        raise ValueError(f"{path} has no run_dir: add one, or give the run directory on the command line")
    root = Path(os.path.abspath(run_dir)) if run_dir else Path(os.path.abspath(folder / named))
    data["name"] = root.name
    config = relocate(from_dict(RunConfig, data, path.name), lambda name: os.path.abspath(folder / name))

    manifest_path = folder / (manifest_name or "dataset.json")
    if not manifest_path.is_file():
        raise ValueError(f"{manifest_path} does not exist: give dataset_manifest in {path.name}, the dataset.json of a"
                         " run whose dataset was prepared on the canvas")
    manifest = files.read_json(manifest_path)
    check_manifest(manifest)
    manifest["cache"] = cache_path_for(cache_root(manifest, manifest_path.parent), root)

    if not (root / "config.json").exists():
        missing = [p for p in (config.model.flux, *(one.path for one in config.model.loras)) if not os.path.exists(p)]
        if missing:  # before the run has its name
            raise ValueError(f"{missing[0]} does not exist: correct its path under model in {path.name}")
        return RunDirectory.create(root, config, manifest)
    run = RunDirectory(root)
    found = run.differences(config)
    serious = [d for d in found if d.grade != MAY_CHANGE]
    if [d for d in serious if not fresh or d.grade == REFUSE or d.name.startswith("model.")]:
        raise ValueError(f"run {run.name!r} was begun differently ({'; '.join(map(str, serious))}): choose another"
                         " run_dir, take the old settings, or continue with --fresh-moments, which takes another"
                         " dataset or optimizer")
    others = run.dataset["fingerprint"] != manifest["fingerprint"]
    if others and not fresh:
        raise ValueError(f"run {run.name!r} was begun with another dataset: choose another run_dir, or continue with"
                         " --fresh-moments")
    for difference in found:
        log.warning("%s", difference)
    if serious or others:
        log.warning("the optimizer's moments begin anew at step %d", run.renew_moments())
    run.update(config, manifest if others else None)
    return run

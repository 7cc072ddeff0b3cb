"""``python -m trainer train``: a run trained from a terminal, as a graph would train it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

from . import files
from .client import open_run
from .config import RunConfig
from .data.manifest import cache_path_for, cache_root, check_manifest
from .launch import LOG_FORMAT
from .progress import Bar, training_text
from .run import MAY_CHANGE, RunDirectory, RunLocked, compare
from .settings import from_dict
from .worker import Worker

log = logging.getLogger(__name__)
SIGNALLED = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
"""Exit codes of a run that a signal stopped, as shells have them."""


def train(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Train until ``args.until``; exit code and the run's last status. ``ValueError`` if that cannot be begun."""
    run = from_config_file(Path(args.config), args.run_dir) if args.config else RunDirectory(args.run_dir)
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
        client.train(until)
        try:
            while True:
                status = client.status(since=seen, wait=2.0)
                for event in status["events"]:
                    seen = event["n"]
                    _show(bar, event, run)
                if not status["events"] and status["state"] not in ("preparing", "training"):
                    break
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
    elif event["type"] == "eval":
        loss = "not a number" if event["loss"] is None else f"{event['loss']:.4f}"
        bar.say(f"step {event['step']}: loss at fixed noise {loss}")
    elif event["type"] == "resumed":
        bar.say(f"resumed at step {event['step']}")
    elif event["type"] == "saved":
        bar.say(f"saved step {event['step']} in {event['seconds']:.1f} s")
    elif event["type"] == "out_of_memory":
        bar.say(f"out of GPU memory at step {event['step']}: {event['updated']} of {event['stages']} parts of the model"
                " were updated; going on with less on the GPU")
    elif event["type"] == "save_failed":
        bar.say(f"not saved: {event['error']}")
    elif event["type"] == "state" and event["state"] in ("preparing", "paused"):
        bar.say({"preparing": "loading", "paused": "paused"}[event["state"]])


def from_config_file(path: Path, run_dir: str | None) -> RunDirectory:
    """The run that a settings file describes: made, or found and given its new settings.

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
    config = _absolute(from_dict(RunConfig, data, path.name), folder)

    manifest_path = folder / (manifest_name or "dataset.json")
    if not manifest_path.is_file():
        raise ValueError(f"{manifest_path} does not exist: give dataset_manifest in {path.name}, the dataset.json of a"
                         " run whose dataset was prepared on the canvas")
    manifest = files.read_json(manifest_path)
    check_manifest(manifest)
    manifest["cache"] = cache_path_for(cache_root(manifest, manifest_path.parent), root)

    if not (root / "config.json").exists():
        return RunDirectory.create(root, config, manifest)
    run = RunDirectory(root)
    found = compare(run.config, config)
    if serious := [d for d in found if d.grade != MAY_CHANGE]:
        raise ValueError(f"run {run.name!r} was begun differently ({'; '.join(map(str, serious))}): choose another"
                         " run_dir, or take the old settings")
    if run.dataset["fingerprint"] != manifest["fingerprint"]:
        raise ValueError(f"run {run.name!r} was begun with another dataset: choose another run_dir")
    for difference in found:
        log.warning("%s", difference)
    run.update(config)
    return run


def _absolute(config: RunConfig, folder: Path) -> RunConfig:
    def whole(name: str) -> str:
        return os.path.abspath(folder / name) if name else ""

    model = {f.name: whole(getattr(config.model, f.name)) for f in dataclasses.fields(config.model)}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        dataset=dataclasses.replace(config.dataset, folder=whole(config.dataset.folder)),
    )

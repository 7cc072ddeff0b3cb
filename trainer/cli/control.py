"""Commands about runs: looked at from the disk, told to their workers where they have one, else done to the disk."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..progress import duration
from ..run import RunDirectory
from ..runs import find_runs
from ..settings import number

if TYPE_CHECKING:
    from ..client import WorkerClient


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add them with ``add(name, function, help)``."""

    def about_run(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = add(name, command, text, json_too=True)
        sub.add_argument("run_dir", metavar="RUN_DIR")
        return sub

    about_run("status", _status, "Show where a run stands.")
    sub = add("runs", _runs, "List the runs in a folder.", json_too=True)
    sub.add_argument("folder", metavar="DIR", nargs="?", default=os.environ.get("FLUX_FFT_HOME", "output/flux_fft"))
    about_run("pause", _pause, "Stop a run within one step; it stays in memory and gives back its VRAM.")
    about_run("stop", _stop, "Stop a run within one step, save it and free its memory.")
    about_run("save", _save, "Make a save point of a run that is in memory; it goes on training.")
    sub = about_run("set-lr", _set_lr, "Have a run train with another learning rate from the next step on.")
    sub.add_argument("lr", type=_rate, metavar="LR", help="such as 3.5e-6; schedules start from it")
    sub = about_run("rollback", _roll_back, "Go back to a save point or checkpoint: what was trained since is lost.")
    sub.add_argument("--to", type=_step, metavar="STEP", help="its step (the newest); 0: the model's own weights")
    sub.add_argument("--fresh-moments", action="store_true",
                     help="begin the optimizer's moments anew, as after a checkpoint they always are")


def write_line(text: str) -> None:
    """One line of an answer."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(status: dict[str, Any], as_json: bool) -> None:
    """A run's status, in one line."""
    if as_json:
        write_line(json.dumps(status))
        return
    at = f"step {status['step']}" + (f" of {status['target']}" if status["target"] is not None else "")
    parts = [f"{status['run']}: {status['state']} at {at}"]
    if status["loss"] is not None:
        parts.append(f"loss {status['loss']:.4f}")
    if status["state"] == "training" and status["seconds_left"] is not None:
        parts.append(f"{status['seconds_per_step']:.2f} s/step, {duration(status['seconds_left'])} left")
    if status["lr_set"] is not None:
        parts.append(f"learning rate set to {status['lr_set']:g}")
    if status["loss_risen"]:
        parts.append(f"the loss is {status['loss_risen']:.3g} times what it was at first: lower the learning rate")
    saved = status["save_point_step"]
    parts.append(f"saved at step {saved}" if saved is not None else "no save point")
    if status["resume_step"] != (saved or 0) and status["worker"] is None:
        parts.append(f"it goes on from step {status['resume_step']}")
    if status["worker"] is not None and status["unsaved_seconds"]:
        parts.append(f"a power cut would cost {duration(status['unsaved_seconds'])}")
    if (saving := status["saving"]) is not None:
        share = saving["done"] / max(saving["total"], 1)
        parts.append(f"writing the {saving['what']} of step {saving['step']}: {share:.0%}")
    elif status["state"] != "training" and status["ram_gb"] is not None:
        rest = f" until it has rested for {duration(status['idle_exit'])}" if status["idle_exit"] else ""
        parts.append(f"holds {status['ram_gb']:g} GB of RAM{rest}")
    if status["error"]:
        parts.append(status["error"])
    write_line(", ".join(parts))


def _step(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no step")
    return int(text)


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, such as 3.5e-6") from None


def _status(args: argparse.Namespace) -> int:
    report(RunDirectory(args.run_dir).status(), args.json)
    return 0


def _runs(args: argparse.Namespace) -> int:
    found = [run.status() for run in find_runs(args.folder)]
    if args.json:
        write_line(json.dumps(found))
        return 0
    for status in found:
        report(status, False)
    if not found:
        itself = os.path.isfile(os.path.join(args.folder, "config.json"))
        write_line(f"no runs in {args.folder}" + (": it is a run itself, ask for its status" if itself else ""))
    return 0


def _pause(args: argparse.Namespace) -> int:
    return _tell(args, lambda client: client.pause())


def _stop(args: argparse.Namespace) -> int:
    return _tell(args, lambda client: client.stop())


def _save(args: argparse.Namespace) -> int:
    return _tell(args, lambda client: client.save())


def _set_lr(args: argparse.Namespace) -> int:
    run = RunDirectory(args.run_dir)
    if not run.locked():
        number("learning rate", args.lr, 0.0, 1.0)
        with run.lock():
            run.append("lr", durable=True, step=run.status()["resume_step"], lr=args.lr)
    return _tell(args, lambda client: client.set_lr(args.lr))


def _tell(args: argparse.Namespace, what: Callable[[WorkerClient], object]) -> int:
    """Have the run's worker do it, if it has one; without one it is paused, stopped and saved as it is."""
    from ..client import open_run

    run = RunDirectory(args.run_dir)
    if run.locked():
        with open_run(run.path, launch=False) as client:
            what(client)
    report(run.status(), args.json)
    return 0


def _roll_back(args: argparse.Namespace) -> int:
    from ..client import open_run

    run = RunDirectory(args.run_dir)
    if run.worker_alive():
        with open_run(run.path, launch=False) as client:
            client.roll_back(args.to, fresh=args.fresh_moments)
    else:
        run.roll_back(args.to, fresh=args.fresh_moments)
    report(run.status(), args.json)
    return 0

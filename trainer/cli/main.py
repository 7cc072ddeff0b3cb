"""The command line. Answers go to stdout; a user's error is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import io
import json
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from ..export.describe import TEXTS
from ..export.write import DTYPES, ExportOptions, Progress, export
from ..launch import EXIT_LOCKED, EXIT_USER_ERROR, LOG_FORMAT
from ..run import RunDirectory, RunLocked
from .control import add_commands, report, write_line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: {message} (--help tells more)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the console's code page lacks is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    args = _parser(arguments).parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    from ..client import WorkerClosing, WorkerDied, WorkerError

    try:
        return args.command(args)
    except (ValueError, WorkerClosing, WorkerDied, WorkerError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return EXIT_USER_ERROR
    except BrokenPipeError:
        return 0  # whoever read what is printed has had enough
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"{where}{error.strerror or error}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m trainer", description="Fine-tune all weights of Flux.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Any, text: str, *, json_too: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        if json_too:
            sub.add_argument("--json", action="store_true", help="print one line of JSON")
        return sub

    sub = add("train", _train, "Train a run until a step, in this process.", json_too=True)
    sub.add_argument("run_dir", nargs="?", metavar="RUN_DIR")
    sub.add_argument("--config", metavar="FILE", help="settings of a new run: RunConfig as JSON, with run_dir and"
                                                      " dataset_manifest; paths are relative to the file")
    sub.add_argument("--until", type=_count, required=True, metavar="N", help="step to train until; a run that is"
                                                                            " there already is left alone")
    sub.add_argument("--fresh-moments", action="store_true", help="with --config: take another dataset or optimizer"
                                                                  " too, on the run's weights")
    sub.add_argument("--save-every", type=_count, metavar="STEPS", help="steps between save points, for this time")

    add_commands(add)

    sub = add("export", _export, "Write a run's weights as a checkpoint or LoRA for others to load.", json_too=True)
    sub.add_argument("run_dir", metavar="RUN_DIR")
    sub.add_argument("--out", required=True, metavar="FILE", help="file to write (.safetensors)")
    sub.add_argument("--dtype", choices=DTYPES, default="bf16", help="fp8 is scaled, as ComfyUI loads it (bf16)")
    sub.add_argument("--lora", type=_count, metavar="RANK", help="a LoRA of this rank against the model's file instead")
    sub.add_argument("--ema", action="store_true", help="the average of the weights instead of the weights")
    sub.add_argument("--from", type=_count, dest="from_step", metavar="STEP",
                     help="the save point or checkpoint of this step (the weights as they are)")
    sub.add_argument("--all-in-one", action="store_true", help="with the text encoders and the VAE of the run's model")
    sub.add_argument("--include", nargs="+", choices=TEXTS, default=(), help="tell these in the file's metadata too")
    sub.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    sub.add_argument("--title", help="title in the file's metadata (the run's name)")

    sub = add("inspect", _inspect, "Say what a model file or folder is, and whether it can be trained.", json_too=True)
    sub.add_argument("file", metavar="FILE", help="file of weights, or folder of a diffusers model")
    sub.epilog = ("Exit code 0: it was named, also as something that cannot be trained ('trainable' in the JSON tells);"
                  " 2: there is nothing at that path, or it cannot be read.")

    sub = add("worker", _worker, "Serve a run to ComfyUI or to other commands (they start it by themselves).")
    sub.add_argument("run_dir", metavar="RUN_DIR")
    sub.add_argument("--idle-exit", type=float, metavar="SECONDS",
                     help="save and exit after so long without work ($FLUX_FFT_IDLE_MINUTES, else 10 minutes)")
    sub.add_argument("--idle-park", type=float, default=10.0, metavar="SECONDS",
                     help="give back the VRAM after so long without work (10)")

    # These bring their own arguments, and some of them torch: only the one that is meant is loaded.
    for name, text in _PLUGINS.items():
        sub = add(name, None, text)
        if name in arguments[:1]:
            module = _plugin(name)
            module.add_arguments(sub)
            sub.set_defaults(command=module.main)
    return parser


_PLUGINS = {
    "demo": "Train the tiny demo model on drawn shapes, from nothing to pictures.",
    "scan": "Look through a folder of pictures and captions.",
    "plan": "Say what memory a run takes, whether that fits, and how long a step should take.",
    "verify": "Read all that a run has saved, and say whether it is what was written.",
    "doctor": "Check and measure this machine: a text for bug reports, and speeds for the plan.",
}


def _plugin(name: str) -> ModuleType:
    if name == "demo":
        from .. import demo

        return demo
    if name == "plan":
        from . import plan

        return plan
    if name == "verify":
        from . import verify

        return verify
    if name == "doctor":
        from ..memory import doctor

        return doctor
    from . import scan

    return scan


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _train(args: argparse.Namespace) -> int:
    from .headless import train

    if not (args.run_dir or args.config):
        raise ValueError("train needs a run directory, or --config FILE for a new run")
    code, status = train(args)
    report(status, args.json)
    if status["state"] == "failed":
        sys.stderr.write(f"{status['error']}\n")
    return code


def _export(args: argparse.Namespace) -> int:
    from ..client import open_run

    run = RunDirectory(args.run_dir)
    options = ExportOptions(
        dtype=args.dtype, lora_rank=args.lora or 0, ema=args.ema, from_step=args.from_step or 0,
        all_in_one=args.all_in_one, include=args.include, overwrite=args.overwrite,
        metadata={"modelspec.title": args.title} if args.title else {})
    if run.worker_alive():
        with open_run(run.path, launch=False) as client:
            done = client.export(args.out, **dataclasses.asdict(options))
    else:
        with run.lock():
            done = export(run, args.out, options, progress=_shown())
            run.note_export(done)
    write_line(json.dumps(done) if args.json else f"{done['path']}: {done['text']}")
    return 0


def _shown() -> Progress | None:
    """Progress on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(what: str, done: int, total: int) -> None:
        sys.stderr.write(f"\r{what} {done / max(total, 1):4.0%}" + ("\n" if done >= total else ""))
        sys.stderr.flush()

    return show


def _inspect(args: argparse.Namespace) -> int:
    from ..flux.info import NOTHING
    from ..flux.variants import inspect_file

    info = inspect_file(args.file)
    named = info.kind not in NOTHING
    if args.json:
        write_line(json.dumps(dataclasses.asdict(info)))
    elif info.trainable:
        note = f" ({info.note})" if info.note else ""
        write_line(f"{info.path}: FLUX.1 {info.variant}{note}, {info.params:,} parameters, {info.dtype}: it can be"
                   " trained")  # fmt: skip
    elif named:
        write_line(info.reason)
    else:
        raise ValueError(info.reason)
    return 0 if named else EXIT_USER_ERROR


def _worker(args: argparse.Namespace) -> int:
    from ..worker import Worker

    worker = Worker(RunDirectory(args.run_dir), idle_park=args.idle_park, idle_exit=args.idle_exit)
    logging.getLogger().handlers[0].setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().setLevel(logging.INFO)
    faulthandler.enable()
    try:
        return worker.serve()
    except RunLocked as error:
        logging.warning("%s", error)
        return EXIT_LOCKED

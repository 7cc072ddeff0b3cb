"""``python -m trainer plan``: a run directory, a file or sizes by name, on this machine or on a given one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config import (
    OPTIMIZERS,
    STATE_FORMATS,
    WEIGHT_PRECISIONS,
    DatasetConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
)
from ..flux.variants import FileInfo, require_flux
from ..memory import machine as machines
from ..memory.alternatives import AUTO_FORMATS
from ..memory.machine import GIB, Machine, Speeds
from ..memory.plan import Plan, resolve, to_dict

BETAS = {"nadam": (0.9, 0.999), "adan": (0.98, 0.92, 0.99)}
"""Each optimizer's usual ones."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``plan``."""
    what = parser.add_argument_group("what is trained")
    what.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="a run; its settings are taken where none is given")
    what.add_argument("--preset", choices=("tiny", "0.3b", "flux-dev"), help="sizes by name")
    what.add_argument("--model", metavar="FILE", help="a Flux file (.safetensors); only its header is read")
    what.add_argument("--batch", type=int, metavar="N", help="pictures per update (5)")
    what.add_argument("--resolution", type=int, metavar="PIXELS", help="side of a square picture (1024)")
    what.add_argument("--optimizer", choices=OPTIMIZERS)
    what.add_argument("--state-format", choices=("auto", *STATE_FORMATS), help="auto: log16, or what fits below it")
    what.add_argument("--weight-precision", choices=("auto", *WEIGHT_PRECISIONS))
    what.add_argument("--ema", action="store_true", help="with a running average of the weights")
    how = parser.add_argument_group("how")
    how.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    how.add_argument("--swap", type=int, metavar="N", help="blocks that wait in host memory (as few as fit)")
    how.add_argument("--activation-offload", choices=("auto", "on", "off"))
    how.add_argument("--micro-batch", type=int, metavar="N", help="pictures that pass a block at once (all)")
    how.add_argument("--reserve-vram", type=float, metavar="GB", help="GiB of VRAM left to the desktop (1)")
    here = parser.add_argument_group("the machine, where it is another than this one (GiB; 10^9 bytes per second)")
    here.add_argument("--vram", type=float, metavar="GB", help="VRAM of the card; 0: no GPU")
    here.add_argument("--ram", type=float, metavar="GB", help="RAM that is installed")
    here.add_argument("--pinnable", type=float, metavar="GB", help="RAM that can be pinned")
    here.add_argument("--tflops", type=float, metavar="T", help="10^12 operations per second of large bf16 products")
    here.add_argument("--h2d", type=float, metavar="GB/S", help="copies to the GPU while the other way is busy too")
    here.add_argument("--d2h", type=float, metavar="GB/S", help="copies back")
    here.add_argument("--dram", type=float, metavar="GB/S", help="reads and writes of the host's memory together")
    here.add_argument("--speeds", metavar="FILE", help="what the doctor measured (machine.json of the runs' folder)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def main(args: argparse.Namespace) -> int:
    """Print the plan. ``ValueError`` if the question makes no sense."""
    config, info, shapes = _question(args)
    plan = decide(config, info, shapes, _machine(args, config.memory), auto=_auto(args))
    _print(json.dumps(to_dict(plan)) if args.json else text(plan))
    return 0


def decide(
    config: RunConfig, info: FileInfo, shapes: Sequence[tuple[int, int]], machine: Machine, auto: tuple[bool, bool]
) -> Plan:
    """The plan; ``auto``: whether state format and weight precision may be chosen."""
    if not any(auto):
        return resolve(config, info, shapes, machine)
    wanted = config.optimizer.state_format, config.optimizer.weight_precision
    tries = [
        pair
        for pair in AUTO_FORMATS
        if all(free or have == want for free, have, want in zip(auto, pair, wanted, strict=True))
    ] or [tuple(a if free else w for free, a, w in zip(auto, AUTO_FORMATS[0], wanted, strict=True))]
    first = None
    for state_format, precision in tries:
        optimizer = replace(config.optimizer, state_format=state_format, weight_precision=precision)
        plan = resolve(replace(config, optimizer=optimizer), info, shapes, machine)
        if plan.fits:
            why = "" if first is None else " (a better one takes more memory than there is)"
            return replace(plan, reasons=(f"state format {state_format} with {precision}{why}", *plan.reasons))
        first = first or plan
    assert first is not None
    return first


def text(plan: Plan) -> str:
    """The plan in lines for people."""
    head = f"{'fits' if plan.fits else 'does not fit'} on {plan.device}: RAM {plan.ram_gb:.1f} GiB"
    if plan.vram_gb:
        head += f", VRAM {plan.vram_gb:.1f} GiB, {plan.pinned_gb:.1f} GiB pinned"
    lines = [f"{head}, disk {plan.disk_gb:.1f} GiB"]
    lines += [f"  {name}: {size:.2f} GiB" for name, size in plan.items.items()]
    if plan.step_seconds is not None:
        lines.append(f"  a step: about {plan.step_seconds:.1f} s, paced by {plan.waits_for}")
    return "\n".join([*lines, *(f"  {reason}" for reason in plan.reasons)])


def _question(args: argparse.Namespace) -> tuple[RunConfig, FileInfo, list[tuple[int, int]]]:
    if sum(bool(x) for x in (args.run_dir, args.preset, args.model)) != 1:
        raise ValueError("plan needs one of RUN_DIR, --preset NAME and --model FILE")
    if args.run_dir:
        from ..run import RunDirectory

        run = RunDirectory(args.run_dir)
        config, info = run.config, run.flux(resumed=run.source() is not None)
        shapes = [(int(h), int(w)) for h, w in (sample["shape"] for sample in run.dataset["samples"])]
    else:
        config = RunConfig(name="plan", model=ModelConfig(flux=args.model or "-"), dataset=DatasetConfig(folder="-"))
        info, shapes = require_flux(args.model) if args.model else preset(args.preset), [(128, 128)]
    if args.resolution is not None:
        if args.resolution < 16:
            raise ValueError(f"resolution is {args.resolution}: give at least 16 pixels")
        shapes = [(args.resolution // 8, args.resolution // 8)]
    given = {"batch_size": args.batch, "ema_decay": 0.999 if args.ema and not config.recipe.ema_decay else None}
    recipe = replace(config.recipe, **{k: v for k, v in given.items() if v is not None})
    given = {"blocks_to_swap": args.swap, "activation_offload": args.activation_offload, "device": args.device,
             "micro_batch": args.micro_batch, "reserve_vram_gb": args.reserve_vram}  # fmt: skip
    memory = replace(config.memory, **{k: v for k, v in given.items() if v is not None})
    assert isinstance(recipe, RecipeConfig) and isinstance(memory, MemoryConfig)
    return replace(config, recipe=recipe, memory=memory, optimizer=_optimizer(args, config.optimizer)), info, shapes


def _optimizer(args: argparse.Namespace, optimizer: OptimizerConfig) -> OptimizerConfig:
    changed: dict = {}
    if args.optimizer and args.optimizer != optimizer.kind:
        changed = {"kind": args.optimizer, "betas": BETAS[args.optimizer]}
    for name, value in (("state_format", args.state_format), ("weight_precision", args.weight_precision)):
        if value not in (None, "auto"):
            changed[name] = value
    return replace(optimizer, **changed)


def _auto(args: argparse.Namespace) -> tuple[bool, bool]:
    """Whether state format and weight precision are to be chosen: of a run they are settled."""
    free = (None, "auto") if not args.run_dir else ("auto",)
    return args.state_format in free, args.weight_precision in free


def preset(name: str) -> FileInfo:
    """A file of one of the presets' sizes, as if it were there."""
    from ..flux.model import PRESETS

    flux = dataclasses.asdict(PRESETS[name])
    return FileInfo(path=name, kind="flux", trainable=True, variant="dev", dtype="bf16", flux=flux)


def _machine(args: argparse.Namespace, memory: MemoryConfig) -> Machine:
    if args.speeds and not Path(args.speeds).exists():
        raise ValueError(f"{args.speeds} does not exist: run python -m trainer doctor first")
    # What was measured here is not true of another card.
    measured = args.speeds or args.vram is None
    speeds = machines.load_speeds(Path(args.speeds) if args.speeds else None) if measured else Speeds()
    given = {name: getattr(args, name) for name in ("tflops", "h2d", "d2h", "dram", "vram", "ram", "pinnable")}
    for name, value in given.items():
        if value is not None and not 0 <= value < 1e6:
            raise ValueError(f"--{name} is {value}: give a number of at least 0")
    speeds = Speeds(**{n: speeds_of if (speeds_of := given[n]) is not None else getattr(speeds, n)
                       for n in Speeds.__dataclass_fields__})  # fmt: skip
    if args.vram is None:
        folder = Path(args.run_dir) if args.run_dir else None
        found = machines.this_machine(memory.device, memory.reserve_vram_gb, now=True, speeds=speeds, folder=folder)
        if args.ram is not None:
            other = machines.given(0, args.ram)
            found = replace(found, ram_free=other.ram_free, ram_now=None)
    else:
        ram = args.ram if args.ram is not None else machines.total_ram() / GIB / machines.INSTALLED_SHARE
        vram = 0.0 if memory.device == "cpu" else args.vram
        found = machines.given(vram, ram, reserve_vram_gb=memory.reserve_vram_gb, speeds=speeds)
    if args.pinnable is not None:
        found = replace(found, pinnable=int(args.pinnable * GIB))
    return found


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

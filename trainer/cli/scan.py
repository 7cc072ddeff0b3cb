"""``python -m trainer scan``: what a folder holds to train on, without training."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from ..config import ALPHAS, ANIMATIONS, CAPTION_LINES, CROPS, MISSING_CAPTIONS, DatasetConfig, RecipeConfig
from ..data.report import table
from ..data.scan import survey, why_not
from ..progress import Bar

_TEXTS = {
    "crop": f"what is kept where a picture is cropped: {', '.join(CROPS)}",
    "alpha": f"transparent pixels: {', '.join(ALPHAS)}",
    "background": "colour behind transparent pixels, #rrggbb",
    "animations": f"animated pictures: {', '.join(ANIMATIONS)}",
    "trigger_word": "caption of pictures that have none; empty: the words of the file name",
    "fixed_caption": "one caption for all pictures (with --missing-captions fixed: for those that have none)",
    "missing_captions": f"pictures without a caption: {', '.join(MISSING_CAPTIONS)}",
    "caption_prefix": "put before every caption",
    "caption_suffix": "put behind every caption",
    "caption_lines": f"a caption file's lines: {', '.join(CAPTION_LINES)}",
    "validation_folder": "folder of pictures that are measured and not trained",
}
_NUMBERS = {
    "bucket_step": (int, "bucket sides are multiples of this"),
    "outside_mask": (float, "weight of the loss where a mask is black"),
    "keep_tags": (int, "so many tags at the front stay where they are"),
    "tag_dropout": (float, "share of the other tags that is left out at a time"),
    "caption_variants": (int, "versions of each caption where tags are shuffled or left out"),
    "repeats": (int, "how often each picture is seen in an epoch"),
    "weight": (float, "factor of the loss of these pictures"),
    "validation_share": (float, "share of the pictures that is measured and not trained"),
}
_SWITCHES = {
    "no_upscale": "do not enlarge small pictures",
    "flip": "train every picture mirrored half of the time",
    "no_masks": "take name.mask.png and masks/name.png for no masks",
    "shuffle_tags": "train the tags (parts between commas) in changing orders",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m trainer scan``: the fields of ``DatasetConfig``."""
    defaults = {f.name: f.default for f in dataclasses.fields(DatasetConfig)}
    parser.add_argument("folder", help="folder of pictures, with captions beside them")
    parser.add_argument("--resolution", default=str(defaults["resolution"]), metavar="N[,N...]",
                        help="side in pixels of the square of equal area; several: at each of them")  # fmt: skip
    parser.add_argument("--also", action="append", default=[], metavar="FOLDER",
                        help="a further folder, with the same settings; may be given again")  # fmt: skip
    for name, text in _TEXTS.items():
        parser.add_argument(_flag(name), default=defaults[name], metavar="TEXT", help=text)
    for name, (kind, text) in _NUMBERS.items():
        default = None if name == "bucket_step" else defaults[name]
        parser.add_argument(_flag(name), type=kind, default=default, metavar="N",
                            help=f"{text} ({defaults[name]})")  # fmt: skip
    for name, text in _SWITCHES.items():
        parser.add_argument(_flag(name), action="store_true", help=text)
    batch_size = RecipeConfig().batch_size
    parser.add_argument("--batch-size", type=int, default=batch_size, metavar="N",
                        help=f"pictures per step, to count the steps of an epoch ({batch_size})")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every file by name")


def main(args: argparse.Namespace) -> int:
    """``python -m trainer scan``. Raises ``ValueError`` if no picture is usable, after printing what was found."""
    config = config_of(args)
    RecipeConfig(batch_size=args.batch_size)
    report = survey(config, _progress())
    if args.json:
        told = report.as_dict() | {"steps_per_epoch": report.steps_per_epoch(args.batch_size)}
        sys.stdout.write(json.dumps(told, ensure_ascii=True) + "\n")
    else:
        lines = table(report, args.batch_size, named=10)
        if sum(line.startswith(("  skipped:", "  warning:")) for line in lines) < len(report.skipped + report.warnings):
            lines.append("  (--json lists each file with what is said of it)")
        if report.usable:
            rate = report.usable / max(report.seconds, 1e-9)
            lines.append(f"  scanned in {report.seconds:.1f} s, {rate:.0f} pictures a second")
        sys.stdout.write("\n".join(lines) + "\n")
    if problem := why_not(report):
        raise ValueError(problem)
    return 0


def _progress() -> Callable[[int, int], None] | None:
    """A bar where somebody looks on."""
    if not sys.stderr.isatty():
        return None
    bar = Bar(1)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done)
        if done >= total:
            bar.close(keep=False)

    return show


def config_of(args: argparse.Namespace) -> DatasetConfig:
    """The settings that the arguments make. Raises ``ValueError``."""
    try:
        first, *more = [int(part) for part in args.resolution.split(",")]
    except ValueError:
        raise ValueError(f"--resolution is {args.resolution!r}: give whole numbers, such as 1024 or 1024,512") from None
    # A resolution below the usual step is meant: a finer step then.
    step = args.bucket_step or (64 if min(first, *more, 256) >= 256 else 16)
    fields: dict[str, Any] = {name: getattr(args, name) for name in (*_TEXTS, *_NUMBERS)}
    fields |= {"resolution": first, "more_resolutions": tuple(more), "bucket_step": step, "flip": args.flip,
               "upscale": not args.no_upscale, "masks": not args.no_masks,
               "shuffle_tags": args.shuffle_tags}  # fmt: skip
    others = {**fields, "validation_folder": ""}
    return DatasetConfig(folder=args.folder, **fields, also=tuple(DatasetConfig(folder=f, **others) for f in args.also))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""``dataset.json`` of a run: which cached entries it trains on, in which order.

``{"format": 1, "cache": path, "samples": [{"image", "latent", "shape": [h, w], "caption"}], "empty_caption": key,
"fingerprint": sha256}``. ``cache`` is relative to the run directory where that makes moving both together possible,
else absolute. ``image`` is relative to the dataset folder, for messages; ``latent`` and ``caption`` are cache keys;
shapes are in latent pixels. There is one sample for each picture and resolution.

A sample also has, where that is asked for: ``flipped`` (key of the mirrored latent), ``captions`` (keys of all its
captions, the first one ``caption``), ``mask`` (key) with ``outside_mask`` (weight where it is black; lacking: 0),
``weight`` and ``repeats`` (lacking: 1). ``validation`` holds the samples that are measured and not trained.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1


EXTRAS = ("flipped", "captions", "mask", "outside_mask", "weight", "repeats")
"""What only some samples have."""


def fingerprint(samples: list[dict[str, Any]], empty_caption: str) -> str:
    """What will be trained on, whatever the pictures are called and wherever they lie: sha256 of the ordered keys."""
    rows: list[Any] = []
    for s in samples:
        extras = {name: s[name] for name in EXTRAS if name in s}
        rows.append([s["latent"], s["shape"], s["caption"], *([extras] if extras else [])])
    return hashlib.sha256(json.dumps([*rows, empty_caption]).encode("ascii")).hexdigest()


def entries(manifest: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Every cache entry that a run needs, as (kind, key), and the picture it is of."""
    found: dict[tuple[str, str], str] = {("captions", manifest["empty_caption"]): "the empty caption"}
    for sample in (*manifest["samples"], *manifest.get("validation", ())):
        latents = [sample["latent"], *([sample["flipped"]] if "flipped" in sample else [])]
        captions = sample.get("captions") or [sample["caption"]]
        for kind, keys in (("latents", latents), ("captions", captions), ("masks", [sample.get("mask")])):
            for key in filter(None, keys):
                found.setdefault((kind, key), sample["image"])
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What sets two lists of samples apart, in words: ``2 pictures added (a.png, b.png), 1 caption changed (c.png)``.

    Pictures are known by their content, so that moving or renaming them is no change. Empty: nothing that is trained.
    """
    if old["fingerprint"] == new["fingerprint"]:
        return ""
    before, after = ({s["latent"]: s for s in manifest["samples"]} for manifest in (old, new))
    names = {s["image"] for s in old["samples"]}
    kept = [(before[k], after[k]) for k in after if k in before]

    def differs(*fields: str) -> list[str]:
        return [new["image"] for old, new in kept if any(old.get(f) != new.get(f) for f in fields)]

    fresh = [s["image"] for k, s in after.items() if k not in before]
    stay = {s["image"] for s in new["samples"]}
    found = (
        ("picture{} added", [n for n in fresh if n not in names]),
        ("picture{} taken out", [s["image"] for k, s in before.items() if k not in after and s["image"] not in stay]),
        ("picture{} changed", [n for n in fresh if n in names]),
        ("caption{} changed", differs("caption", "captions")),
        ("mask{} changed", differs("mask", "outside_mask")),
        ("picture{} with other repeats, weight or mirroring", differs("repeats", "weight", "flipped")),
    )  # fmt: skip
    parts = []
    for what, images in found:
        images = list(dict.fromkeys(images))
        if images:
            some = ", ".join(images[:3]) + (" ..." if len(images) > 3 else "")
            parts.append(f"{len(images)} {what.format('' if len(images) == 1 else 's')} ({some})")
    return ", ".join(parts) or "their order changed"


def cache_path_for(root: Path, run_dir: str | Path | None) -> str:
    """How a run's manifest names the cache: relative if it lies inside the run directory or beside it."""
    root = Path(os.path.abspath(root))
    if run_dir is not None:
        run = Path(os.path.abspath(run_dir))
        if root != run and root.is_relative_to(run):
            return root.relative_to(run).as_posix()
        if root.parent == run.parent:
            return f"../{root.name}"
    return str(root)


def cache_root(manifest: Mapping[str, Any], run_dir: str | Path) -> Path:
    """The cache folder that a manifest names. Raises ``ValueError`` if it is gone."""
    root = Path(os.path.normpath(os.path.join(os.path.abspath(run_dir), manifest["cache"])))
    if not root.is_dir():
        raise ValueError(f"the cache folder {root} is gone: move it back there, or prepare the dataset again")
    return root


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless this is a manifest that this version reads."""
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"dataset.json has format {manifest.get('format')!r}: this program reads {FORMAT}, prepare the data again"
        )
    lacking = [k for k in ("cache", "samples", "empty_caption", "fingerprint") if k not in manifest]
    if lacking:
        raise ValueError(f"dataset.json lacks {lacking[0]}: prepare the dataset again")
    if not manifest["samples"]:
        raise ValueError("dataset.json has no samples: give a folder with at least one usable picture")

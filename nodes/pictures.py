"""Pictures of the weights in training: sampled through ComfyUI's own samplers, kept in the run's ``samples/``.

Each is a PNG beside a JSON of the same name that says at which step and with which settings it was made. A picture is
looked up by these, so that a graph that is queued again, when the run has long moved on, shows what was then.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trainer.files import PART, read_json, replace, unlink, write_json
from ..trainer.saves.saved import kept_at, weights
from . import bridge_model, registry, words
from .encoders import Encoders
from .handles import PreviewSettings, RunHandle

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ..trainer.run import RunDirectory


def predictor(handle: RunHandle, average: bool = False) -> bridge_model.Predict:
    """The velocity of a run's weights at the handle's step, as the proxy MODEL asks for it. Cancel is heard.

    ``average``: of the running average of the weights.
    """
    from ..trainer.protocol import RunMovedOn

    def ask(*values: Any) -> Tensor:
        return registry.client(handle.name).predict(*values, step=handle.step, ema=average)

    def predict(*values: Any) -> Tensor:
        with words.speaking({}):  # it is called by other nodes than ours
            run = registry.open_directory(handle)
            try:
                return registry.cancellable(ask, *values)
            except RunMovedOn:
                now = run.status()["resume_step"]
                raise RunMovedOn(
                    f"run {run.name!r} is at step {now} and this MODEL stands for its step {handle.step}: raise the "
                    f"steps of Train Steps so that it ends at {now} or later, take the newest weights from Open a Run, "
                    "or connect the sampler's output to the `after` input of the next Train Steps") from None

    return predict


def proxy(handle: RunHandle, run: RunDirectory, *, parks: bool = True, average: bool = False) -> Any:
    """A ComfyUI MODEL of the run's weights at the handle's step. The worker is opened when it is first sampled.

    ``parks``: at the end of each sampling it gives back its VRAM, for the VAE to decode. What the run has kept is
    ComfyUI's to load, as a MODEL like any other.
    """
    if handle.saved:
        return bridge_model.load_model(weights(kept_at(run, handle.step)))
    info = registry.flux_of(run)
    assert info.flux is not None
    done = functools.partial(registry.park, run) if parks else None
    return bridge_model.proxy_model(dict(info.flux), predictor(handle, average), done)


def require_average(run: RunDirectory, saved: bool) -> None:
    """Raise ``ValueError`` unless the running average of the run's weights can be sampled."""
    if saved:
        raise ValueError("average: it can only be sampled of the run as it is; open the run at its latest step, or turn"
                         " average off")
    if not run.config.recipe.ema_decay:
        raise ValueError(f"average: run {run.name!r} keeps no average of its weights; set ema_decay in Training Recipe,"
                         " or turn average off")


@dataclasses.dataclass(frozen=True)
class Kept:
    """The pictures of one step, in the order of the prompts."""

    step: int
    prompts: tuple[str, ...]
    paths: list[Path]

    def line(self) -> str:
        """Which they are, for the user."""
        each = "; ".join(f"{i}. {prompt}" for i, prompt in enumerate(self.prompts, 1))
        return f"Pictures of step {self.step}: {each}"


class Sampler:
    """Samples a run's previews; ``saved``: of what it has kept at a step, not of the run as it is.

    ``with`` it: on leaving, encoders that were loaded are dropped.
    """

    def __init__(self, run: RunDirectory, settings: PreviewSettings | None, *, saved: bool = False) -> None:
        if settings is not None and settings.average:
            require_average(run, saved)
        self.run, self.settings = run, settings
        self._encoders: Encoders | None = None
        self._saved = saved
        self._texts: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._encoders is not None:
            self._encoders.drop()

    def encode_prompts(self) -> None:
        """Encode the prompts, and the empty one for CFG, before the worker takes VRAM. Raises ``ValueError``."""
        if self.settings is not None and not self._texts:
            self._encoders = Encoders(registry.model_of(self.run), registry.flux_of(self.run))
            self._texts = self._encoders.prompts([*self.settings.prompts, ""])
            self._encoders.drop()  # T5 must not lie in RAM while the run trains

    def stops(self, start: int, target: int) -> list[int]:
        """The steps above ``start`` and below ``target`` at which pictures are due."""
        every = self.settings.every_n_steps if self.settings else 0
        return list(range(start - start % every + every, target, every)) if every else []

    def due(self, step: int) -> bool:
        """Whether pictures are due at a step."""
        every = self.settings.every_n_steps if self.settings else 0
        return bool(every) and step % every == 0

    def newest(self, start: int, target: int) -> Kept | None:
        """The pictures kept at the last step of (start, target] that has them all."""
        for step in sorted(self._named(), reverse=True):
            if start < step <= target and self.due(step) and (found := self.recorded(step)) is not None:
                assert self.settings is not None
                return Kept(step, self.settings.prompts, found)
        return None

    def steps(self) -> set[int]:
        """The steps whose pictures were kept."""
        return {step for step in self._named() if self.recorded(step) is not None}

    def _named(self) -> set[int]:
        """The steps of which there are pictures of a first prompt, whatever their settings."""
        folder = self.run.path / "samples"
        names = [p.name for p in folder.glob("step-*_00_*.png")] if self.settings is not None else []
        return {int(found[1]) for found in (re.match(r"step-(\d+)_", name) for name in names) if found}

    def paths(self, step: int, average: bool = False) -> list[Path]:
        """Where the pictures of a step, or of the average of the weights there, lie, one per prompt."""
        assert self.settings is not None
        folder = self.run.path / "samples" / ("average" if average else "")
        return [folder / f"step-{step:06d}_{i:02d}_{self._key(step, i, average)[:8]}.png"
                for i in range(len(self.settings.prompts))]

    def recorded(self, step: int, average: bool = False) -> list[Path] | None:
        """The pictures of a step with these settings, if all were kept."""
        paths = self.paths(step, average)
        for i, path in enumerate(paths):
            try:
                if read_json(path.with_suffix(".json")).get("key") != self._key(step, i, average) or not path.exists():
                    return None
            except ValueError:
                return None
        return paths

    def take(self, step: int, model: Any = None, average: bool = False, tell: bool = True) -> list[Path]:
        """Sample every prompt at ``step`` and keep the pictures.

        ``model``: a MODEL of that step's weights, if it is at hand. ``tell``: as the run's newest pictures.
        """
        assert self.settings is not None
        self.encode_prompts()
        assert self._encoders is not None
        if model is None:
            handle = RunHandle(name=self.run.name, uid=self.run.uid, step=step, saved=self._saved)
            model = proxy(handle, self.run, parks=False, average=average or self.settings.average)
        s = self.settings
        paths = self.paths(step, average)
        try:
            latents = [bridge_model.sample(model, positive=text, negative=self._texts[-1], width=s.width,
                                           height=s.height, seed=s.preview_seed, steps=s.sampling_steps, cfg=s.cfg,
                                           sampler=s.sampler, scheduler=s.scheduler, guidance=s.guidance)
                       for text in self._texts[:-1]]
        finally:
            registry.park(self.run)  # the VAE needs VRAM now
        for i, (path, latent) in enumerate(zip(paths, latents, strict=True)):
            self._keep(path, self._encoders.decode(latent)[0], step, i, average, tell)
        return paths

    def _about(self, step: int, index: int, average: bool) -> dict[str, Any]:
        assert self.settings is not None
        about = dataclasses.asdict(self.settings)
        about.pop("every_n_steps")
        about["prompt"] = about.pop("prompts")[index]
        of_average = about.pop("average") or average
        about |= {"average": True} if of_average else {}
        run = self.run
        return {"run": run.name, "uid": run.uid, "rollbacks": run.rollbacks, "step": step, "index": index} | about

    def _key(self, step: int, index: int, average: bool) -> str:
        about = self._about(step, index, average)
        about.pop("run")
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def _keep(self, path: Path, picture: Tensor, step: int, index: int, average: bool, tell: bool) -> None:
        from PIL import Image, PngImagePlugin

        about = self._about(step, index, average) | {"key": self._key(step, index, average)}
        info = PngImagePlugin.PngInfo()
        info.add_text("flux_fft", json.dumps(about))
        part = path.with_name(f"{PART}{path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            Image.fromarray((picture * 255).round().byte().numpy()).save(part, format="PNG", pnginfo=info)
            replace(part, path)
        finally:
            unlink(part)  # of a full disk, on which it would stay
        write_json(path.with_suffix(".json"), about)
        if tell:
            self.run.append("sample", step=step, file=f"samples/{path.name}", prompt=about["prompt"], index=index)


def as_images(paths: Sequence[Path]) -> Tensor:
    """An IMAGE [B, H, W, 3] in 0..1 of kept pictures."""
    import numpy
    import torch
    from PIL import Image

    pictures = [numpy.asarray(Image.open(p).convert("RGB"), dtype="float32") for p in paths]
    return torch.from_numpy(numpy.stack(pictures) / 255)


def sheet(paths: Sequence[Path], side: int = 512) -> Image:
    """All pictures (of one size) in rows, at most ``side`` pixels wide and high: the node's live display has one."""
    from PIL import Image

    found = [Image.open(p).convert("RGB") for p in paths]
    columns = math.ceil(math.sqrt(len(found)))
    width, height = found[0].size
    whole = Image.new("RGB", (columns * width, math.ceil(len(found) / columns) * height))
    for i, picture in enumerate(found):
        whole.paste(picture, (i % columns * width, i // columns * height))
    whole.thumbnail((side, side))
    return whole

"""The run directory: the single truth that survives both processes.

::

    NAME/
        run.json        format, uid (new with every creation), rollbacks; batches to skip, what to go on from
        config.json     the settings (trainer.config.RunConfig)
        dataset.json    which cached latents and captions are trained
        model.json      what its Flux is (flux.variants.FileInfo): a save point needs no model file beside it
        events.jsonl    what happened (trainer.events)
        lock            held by the operating system for the worker that has the run open
        worker.json     where that worker answers; worker.log its words
        saving.json     what is being written just now, and how large it will be (saves.underway)
        samples/        pictures sampled in training
        state/          step-000500/: the save point, with save.json that lists its files
        checkpoints/    NAME-step-000500.safetensors: weights only, for others to load

No file in it names the directory itself: paths below it are stored relative to it, so it can be moved and copied.
Whoever holds ``lock`` may change ``state/`` and move the run from state to state; anyone may read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .compare import ASK, MAY_CHANGE, REFUSE, Difference, compare, flat, relocate
from .config import FORMAT_VERSION, RunConfig
from .data.manifest import check_manifest
from .events import TRANSITIONS, EventLog
from .export.model_note import noted_fingerprint, noted_flux
from .saves import savepoints, sources, underway, weights_only
from .saves.leftovers import prepare, sweep
from .saves.savepoints import Source
from .settings import from_dict, to_dict
from .status import status

if TYPE_CHECKING:
    from .flux.variants import FileInfo
    from .weights import Entry

__all__ = ["ASK", "MAY_CHANGE", "REFUSE", "Difference", "RunDirectory", "RunLocked", "Source", "compare"]

log = logging.getLogger(__name__)


class RunLocked(ValueError):
    """Another process has the run open."""


class RunDirectory:
    """One run on disk. Safe to use from several threads; several processes may hold one of the same directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        if not (self.path / "config.json").is_file():
            raise ValueError(f"{self.path} is no run directory: it has no config.json")
        found = self.facts().get("format")
        if found != FORMAT_VERSION:
            raise ValueError(f"{self.path} has format {found}, this program reads {FORMAT_VERSION}: use the version"
                             " that wrote it")
        self.log = EventLog(self.path / "events.jsonl")

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: RunConfig, dataset: dict[str, Any]) -> RunDirectory:
        """Make the run at ``path`` (an existing folder may hold other files). ``ValueError`` where one is already."""
        root = Path(os.path.abspath(path))
        if (root / "config.json").exists():
            raise ValueError(f"{root} already holds a run: choose another name or delete it")
        prepare(root)
        files.write_json(root / "run.json", {"format": FORMAT_VERSION, "uid": secrets.token_hex(8), "rollbacks": 0})
        files.write_json(root / "dataset.json", dataset)
        EventLog(root / "events.jsonl").append("state", durable=True, state="created")
        # What makes it a run comes last.
        files.write_json(root / "config.json", to_dict(relocate(config, lambda p: _inside(p, root))))
        return cls(root)

    # -- what it is

    @property
    def name(self) -> str:
        """The directory's name: a run that was moved or copied is called as it lies there."""
        return self.path.name

    @property
    def config(self) -> RunConfig:
        """The settings as they are on disk now, with whole paths."""
        stored = from_dict(RunConfig, files.read_json(self.path / "config.json"), "config.json")
        return relocate(stored, lambda p: str(self.path / p))

    @property
    def dataset(self) -> dict[str, Any]:
        """The manifest of cached samples (its ``cache`` is relative to the run directory unless absolute)."""
        manifest = files.read_json(self.path / "dataset.json")
        check_manifest(manifest)
        return manifest

    def flux(self, *, resumed: bool) -> FileInfo:
        """What Flux is trained: that of the model's file, which is noted; as noted, where the run is ``resumed``.

        ``ValueError`` in one line if it has to be looked at and cannot be trained.
        """
        return noted_flux(self.path / "model.json", self.config.model.flux, noted=resumed)

    def differences(self, config: RunConfig) -> list[Difference]:
        """What sets other settings apart from the run's own; see ``compare``."""
        mine = self.config
        return compare(mine, config, noted=noted_fingerprint(self.path / "model.json", mine.model.flux))

    @property
    def uid(self) -> str:
        """Differs between runs, also between one that was deleted and its successor of the same name."""
        return str(self.facts()["uid"])

    def is_still(self, uid: str) -> bool:
        """Whether the folder is that run's: not if it was deleted or moved, or another run was made in its place."""
        return (self.path / "run.json").exists() and self.uid == uid

    @property
    def rollbacks(self) -> int:
        """How often the user has gone back to an earlier step."""
        return int(self.facts()["rollbacks"])

    @property
    def skipped(self) -> tuple[int, ...]:
        """Numbers of the batches that are left out, in order: they made numbers that are none."""
        return tuple(self.facts().get("skipped", ()))

    def facts(self) -> dict[str, Any]:
        """What ``run.json`` says."""
        facts = files.read_json(self.path / "run.json")
        if not {"uid", "rollbacks"} <= set(facts):
            raise ValueError(f"{self.path / 'run.json'} is damaged: put it back from a copy, or begin another run")
        return facts

    def note(self, **facts: Any) -> None:
        """Change what ``run.json`` says; None takes a fact out. Needs the lock."""
        known = {**self.facts(), **facts}
        files.write_json(self.path / "run.json", {name: value for name, value in known.items() if value is not None})

    def update(self, config: RunConfig, dataset: dict[str, Any] | None = None) -> list[str]:
        """Take new settings; returns the names of those that changed. A worker takes them at its next ``train``."""
        before, after = flat(self.config), flat(config)
        changed = sorted(name for name in after if before.get(name) != after[name] and name != "name")
        if dataset is not None and dataset != self.dataset:
            files.write_json(self.path / "dataset.json", dataset)
            changed.append("dataset.json")
        if changed:
            files.write_json(self.path / "config.json", to_dict(relocate(config, lambda p: _inside(p, self.path))))
            self.append("config", changed=changed)
        return changed

    # -- what happened

    def append(self, kind: str, *, durable: bool = False, **fields: Any) -> dict[str, Any]:
        """Add a numbered, timed event; see ``trainer.events`` for the types."""
        return self.log.append(kind, durable=durable, **fields)

    def events(self, since: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Events numbered above ``since``."""
        return self.log.events(since, limit)

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of some types, oldest first: of a long run much cheaper than looking through all."""
        return self.log.events_of(*kinds)

    def transition(self, state: str, **fields: Any) -> dict[str, Any]:
        """Move the run to ``state`` (``target``, ``error``: where they belong to it), on the disk at once."""
        with self.log.changed:
            now = self.log.history().state
            if now not in TRANSITIONS or (now is None and state != "created"):
                says = "does not tell how the run began" if now is None else f"has the unknown state {now!r}"
                raise ValueError(f"{self.log.path} {says}: put it back from a copy, or begin another run")
            assert state in TRANSITIONS[now], f"a run cannot go from {now} to {state}"
            return self.append("state", durable=True, state=state, **fields)

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of every update that is part of the run's present; lost and repeated ones are left out."""
        with self.log.changed:
            steps = self.log.history().steps
            return list(zip(steps.column("step"), steps.column("loss"), strict=True))

    def evals(self) -> list[tuple[int, float]]:
        """(step, loss) at fixed noise and timesteps."""
        with self.log.changed:
            return [(e["step"], e["loss"]) for e in self.log.history().evals]

    def status(self) -> dict[str, Any]:
        """The run at this moment, from the disk alone: any process may ask, whether a worker lives or not.

        ``step`` counts the updates made; ``resume_step`` is the step whose weights one gets by opening the run now:
        lower than ``step`` when it was interrupted after its last save point. ``saving``: see there.
        """
        return status(self)

    def saving(self) -> dict[str, Any] | None:
        """What its living worker writes just now: ``what``, of which ``step``, and bytes ``done`` of ``total``."""
        return underway.saving(self.path)

    def note_export(self, done: Mapping[str, Any]) -> dict[str, Any]:
        """Add the event of a file that was written, of which ``export`` says ``done``; returns it."""
        folder, file = os.path.split(done["path"])
        return self.append("exported", step=done["step"], dtype=done["dtype"], file=file,
                           folder=_inside(folder, self.path))

    # -- who has it open

    @contextlib.contextmanager
    def lock(self, wait: float = 2.0) -> Iterator[None]:
        """Hold the run for this process. ``RunLocked`` if another has it; what a crash left half-written is removed.

        ``wait``: seconds to try, because whoever only looks whether it is held holds it for an instant.
        """
        with open(self.path / "lock", "a+b") as file, files.exclusive(file, wait) as got:
            if not got:
                raise RunLocked(f"run {self.name!r} is open in another process: stop that first ({self.path})")
            files.unlink(self.address_file)  # of a worker that did not get to remove it
            sweep(self.path)
            yield

    def locked(self) -> bool:
        """Whether a process has the run open."""
        return files.is_locked(self.path / "lock")

    @property
    def address_file(self) -> Path:
        """Where the worker that holds the lock answers."""
        return self.path / "worker.json"

    @property
    def log_file(self) -> Path:
        """What workers wrote to their standard error."""
        return self.path / "worker.log"

    def worker_alive(self) -> bool:
        """Whether a worker has the run open (and not, say, an export that only reads a save point)."""
        return self.address_file.exists() and self.locked()

    # -- save points and checkpoints

    @property
    def saved_in(self) -> tuple[Path, str]:
        """The folder of the save points, and whose they are: what ``savepoints`` asks for."""
        return self.path / "state", self.uid

    def save_points(self) -> list[Source]:
        """The whole save points, oldest first."""
        return savepoints.save_points(*self.saved_in)

    def latest_save_point(self) -> Source | None:
        """The newest whole save point."""
        points = self.save_points()
        return points[-1] if points else None

    def write_save_point(self, step: int, write: Callable[[Path], Mapping[str, str] | None], keep: int = 1) -> Source:
        """Make a save point from the files that ``write`` puts into a folder; see ``savepoints``. Needs the lock."""
        return savepoints.write_save_point(*self.saved_in, step, write, keep)

    def checkpoints(self, *, damaged: bool = False) -> list[Source]:
        """The run's weights-only checkpoints, oldest first; ``damaged``: also what is called like one, but is none."""
        return weights_only.checkpoints(self.path / "checkpoints", self.uid, damaged=damaged)

    def write_checkpoint(self, step: int, entries: Sequence[Entry], metadata: Mapping[str, str], keep: int = 0) -> Path:
        """Make a weights-only checkpoint of bf16 ``entries``; see ``weights_only``. Needs the lock."""
        source, run = self.source(), f"{self.uid}.{self.rollbacks}"
        return weights_only.write_checkpoint(self.path / "checkpoints", self.name, run, step, entries, metadata, keep,
                                             spare=source.path if source else None)

    def source(self) -> Source | None:
        """What the run goes on from when it is opened; None: the model's file."""
        found = sources.sources(self)
        return found[-1] if found else None

    def resume(self, load: Callable[[Source], object]) -> Source | None:
        """Have ``load`` take that up, or what was before it if it is damaged; see ``sources``. Needs the lock."""
        return sources.resume(self, load)

    def find_source(self, step: int | None, *, fresh: bool = False, checkpoint: bool = False) -> Source | None:
        """What was saved of ``step``; see ``sources.find``."""
        return sources.find(self, step, fresh=fresh, checkpoint=checkpoint)

    def take_back(self, source: Source | None, *, skip: int | None = None, why: str = "") -> dict[str, Any]:
        """Have the run go on from what ``find_source`` gave; returns the event; see ``sources``. Needs the lock."""
        return sources.take_back(self, source, skip=skip, why=why)

    def renew_moments(self) -> int:
        """Have the run go on from the weights it has with moments of zero; returns its step. ``RunLocked`` while open.
        """
        with self.lock():
            return sources.renew_moments(self)

    def roll_back(self, step: int | None = None, *, fresh: bool = False) -> Source | None:
        """Go back to what was saved of ``step``, in a run that no worker has open; ``RunLocked`` if one has.

        ``ValueError``, and nothing has changed, where there is no such thing, or it is damaged.
        """
        with self.lock():
            source = self.find_source(step, fresh=fresh)
            if source is not None:
                verify = savepoints.verify if source.path.is_dir() else weights_only.verify
                if wrong := verify(source.path):
                    raise files.Damaged(wrong[0])
            self.take_back(source)
            if "stopped" in TRANSITIONS.get(self.log.history().state, ()):
                self.transition("stopped")
            return source

    def delete(self) -> None:
        """Remove the run with all that is in its directory. ``RunLocked`` while a worker has it open; ``ValueError``,
        and it is there as it was, if something holds a file of it (Windows)."""
        settings, aside = self.path / "config.json", self.path / f"{files.PART}config.json"
        with self.lock():
            # Without its config it is no run any more, should removing the rest be cut short.
            files.replace(settings, aside)
        try:
            files.remove_tree(self.path)
        except OSError as error:
            if not self.path.is_dir():
                raise
            files.replace(aside, settings)
            raise ValueError(f"run {self.name!r} could not be deleted ({error.strerror or error}): close what has its"
                             " files open, then try again") from error


def _inside(path: str, root: Path) -> str:
    """``path`` relative to ``root`` where it lies below it, else absolute."""
    whole = Path(os.path.abspath(path))
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else str(whole)

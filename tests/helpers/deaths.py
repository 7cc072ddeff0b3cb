"""A run directory on which everything is tried while the process dies, or the disk fills, at each deed in turn.

Run as a program in a process of its own, which forks: ``deaths.py FOLDER WAY``; see ``test_failpoints.py``. Its last
line is JSON: of each action the deeds at which it ended, and what was wrong after some.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conftest import write_flux, write_manifest
from trainer import files
from trainer.config import DatasetConfig, MemoryConfig, ModelConfig, OptimizerConfig, RecipeConfig, RunConfig
from trainer.events import TRANSITIONS
from trainer.loop import Trainer
from trainer.run import RunDirectory
from trainer.runs import find_runs
from trainer.saves import checkpoint, leftovers, masters, savepoints
from trainer.saves.savepoints import Source

ACTIONS: dict[str, Callable[[World, Path], object]] = {}


def action(function: Callable[[World, Path], object]) -> Callable[[World, Path], object]:
    ACTIONS[function.__name__] = function
    return function


class World:
    """A run with save points of steps 1 and 2 and a checkpoint of step 2, and its engine at step 3."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        checkpoint.HANDS = 1  # so that the deeds come in one order
        leftovers.YOUNG = -1.0
        self.base = folder / "base" / "run"
        self.base.mkdir(parents=True)
        flux = write_flux(self.base / "flux.safetensors")
        self.config = RunConfig(
            name="run", model=ModelConfig(flux=str(flux)), dataset=DatasetConfig(folder=str(self.base)),
            optimizer=OptimizerConfig(lr=1e-3), recipe=RecipeConfig(batch_size=2, keep_save_points=2),
            memory=MemoryConfig(device="cpu"))  # fmt: skip
        self.manifest = write_manifest(self.base, [(8, 8)] * 4)
        run = RunDirectory.create(self.base, self.config, self.manifest)
        self.trainer = Trainer(self.config, self.base, dataset=self.manifest)
        self.reader = Trainer(self.config, self.base, dataset=self.manifest, fill=lambda stages: None)
        self.states: dict[tuple[int, object], dict[str, torch.Tensor]] = {}
        run.flux(resumed=False)
        for state in ("preparing", "training"):
            run.transition(state)
        with run.lock():
            for step in (1, 2, 3):
                self.trainer.train_step()
                run.append("step", step=step, loss=1.0, lr=1e-3, seconds=1.0)
                self.states[step, False] = contents(self.trainer)
                if step < 3:
                    run.write_save_point(step, self.trainer.save, keep=3)
                    run.append("saved", durable=True, step=step, seconds=1.0)
            run.write_checkpoint(2, masters.saved_entries(run.save_points()[1].path, "bf16"), {})
        for source in (*run.save_points(), *run.checkpoints()):
            self.reader.load(dataclasses.replace(source, fresh=True))
            self.states[source.step, source.path.is_dir() or "file"] = contents(self.reader)

    def copy(self, to: Path) -> Path:
        """Another such run; what nothing may ever write into again is not copied."""
        def link(source: str, target: str) -> None:
            (os.link if "/state/" in source or "flux" in source else shutil.copy2)(source, target)

        shutil.copytree(self.base, to / "run", copy_function=link)
        return to / "run"


def contents(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that a trainer is, but for the steps it has made."""
    groups = [(stage.name, group) for stage in trainer.stages for group in stage.arena.groups]
    found = {f"{n}.{g.label}.{k}": t.clone() for n, g in groups for k, t in {"w": g.current, **g.storage}.items()}
    return {**found, "since": torch.tensor(trainer.since)}


@action
def save(world: World, path: Path) -> None:
    run = RunDirectory(path)
    with run.lock():
        run.write_save_point(3, world.trainer.save, keep=2)
        run.append("saved", durable=True, step=3, seconds=1.0)


@action
def write_checkpoint(world: World, path: Path) -> None:
    run = RunDirectory(path)
    with run.lock():
        name = run.write_checkpoint(3, world.trainer.entries("bf16"), {}, keep=1).name
        run.append("checkpoint", durable=True, step=3, file=name)


@action
def write_checkpoint_again(world: World, path: Path) -> None:
    run = RunDirectory(path)
    with run.lock():
        run.write_checkpoint(2, masters.saved_entries(run.save_points()[1].path, "bf16"), {"about": "anew"}, keep=1)


@action
def roll_back(world: World, path: Path) -> None:
    RunDirectory(path).roll_back(1)


@action
def roll_back_to_a_checkpoint(world: World, path: Path) -> None:
    run = RunDirectory(path)
    with run.lock():
        run.take_back(run.find_source(2, checkpoint=True))


@action
def roll_back_to_the_beginning(world: World, path: Path) -> None:
    RunDirectory(path).roll_back(0)


@action
def fall_back(world: World, path: Path) -> None:
    """What opening a run does whose newest save point is damaged."""
    run = RunDirectory(path)
    broken = run.path / "state" / "step-000002" / "final_layer.safetensors"
    if broken.exists():
        data = broken.read_bytes()
        broken.unlink()  # it is linked
        broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with run.lock():
        assert run.resume(world.reader.load) is not None


@action
def create(world: World, path: Path) -> None:
    if not (path.parent / "new" / "config.json").exists():
        RunDirectory.create(path.parent / "new", world.config, world.manifest)


@action
def create_in_place(world: World, path: Path) -> None:
    """Where a run was deleted, but not wholly."""
    if (path / "config.json").exists() and RunDirectory(path).rollbacks == 0 and RunDirectory(path).save_points():
        (path / "config.json").unlink()
    if not (path / "config.json").exists():
        RunDirectory.create(path, world.config, world.manifest)


@action
def update(world: World, path: Path) -> None:
    recipe = dataclasses.replace(world.config.recipe, batch_size=1)
    RunDirectory(path).update(dataclasses.replace(RunDirectory(path).config, recipe=recipe),
                              {**world.manifest, "fingerprint": "e" * 64})  # fmt: skip


@action
def append(world: World, path: Path) -> None:
    run = RunDirectory(path)
    run.append("step", step=4, loss=1.0, lr=1e-3, seconds=1.0)
    run.append("saved", durable=True, step=4, seconds=1.0)


@action
def delete(world: World, path: Path) -> None:
    if (path / "config.json").exists():
        RunDirectory(path).delete()


# -- what is left


def check(world: World, path: Path, action: str) -> None:
    """Raise unless what lies at ``path`` is whole."""
    for one in sorted({path, *(p for p in path.parent.iterdir() if p.is_dir() and not p.name.startswith("."))}):
        if (one / "config.json").exists():
            check_run(world, RunDirectory(one), damaged=action == "fall_back")
        else:
            assert action in ("create", "create_in_place", "delete"), f"{one} is no run any more"


def check_run(world: World, run: RunDirectory, damaged: bool) -> None:
    assert run.path in [found.path for found in find_runs(run.path.parent)]
    assert not run.locked()
    events = run.events()
    assert [e["n"] for e in events] == list(range(1, len(events) + 1)), "numbers of events"
    assert run.log.history().state in TRANSITIONS, run.log.history().state
    assert run.config.name == "run" and run.dataset["samples"] and run.status()["state"] is not None
    with run.lock():
        pass  # the next start cleans up
    left = [str(p) for p in run.path.rglob("*") if p.name.startswith(".part") or p.name.endswith(".part")]
    assert not left, f"left behind: {left}"
    for point in run.save_points():
        wrong = savepoints.verify(point.path)
        assert not wrong or (damaged and point.step == 2), wrong
    for one in run.checkpoints(damaged=True):
        assert files.sha256(one.path)
        checked(world, one)
    if not damaged:
        with run.lock():
            source = run.resume(world.reader.load)
        if source is not None:
            checked(world, source, loaded=True)
        else:
            assert run.log.history().state == "created" or run.rollbacks > 0, "it has nothing to go on from"


def checked(world: World, source: Source, *, loaded: bool = False) -> None:
    """It holds what the engine was at that step, bit for bit."""
    if not loaded:
        world.reader.load(source)
    if source.step == 3 and source.path.is_file():
        return  # whole, as its header says; no other is known to compare with
    kind = False if not source.fresh else (source.path.is_dir() or "file")
    wanted, found = world.states[source.step, kind], contents(world.reader)
    assert world.reader.step == source.step and wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, found[name]), f"{name} at {source}"


# -- ends


def forked(work: Callable[[], None]) -> tuple[int, str]:
    """How ``work()`` ended in a process of its own, a signal or an exit code, and what it wrote with ``tell``."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(writing, TOLD)
        code = 0
        try:
            work()
        except BaseException:
            traceback.print_exc()
            code = 70
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as told:
        text = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


TOLD = 100


def tell(text: str) -> None:
    os.write(TOLD, text.encode())


def killed(world: World, act: Callable[[World, Path], object], path: Path, at: int) -> str:
    """The deed number ``at``, before which the process ended; empty if there are fewer. ``path`` is as that left it."""
    deeds = itertools.count()

    def failpoint(deed: str, of: Path) -> None:
        if next(deeds) == at:
            tell(f"{deed} {of.name}")
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        files.failpoint = failpoint
        act(world, path)

    code, deed = forked(work)
    assert code == (-signal.SIGKILL if deed else 0), f"it ended by itself with {code}"
    return deed


def filled(world: World, act: Callable[[World, Path], object], path: Path, at: int) -> str:
    """The same where the disk is full from that deed on: whoever asked for it is told in one line."""
    deeds: list[str] = []

    def failpoint(deed: str, of: Path) -> None:
        deeds.append(f"{deed} {of.name}")
        if len(deeds) > at and deed in ("write", "sync"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def work() -> None:
        files.failpoint = failpoint
        try:
            act(world, path)
        except (ValueError, OSError) as error:
            assert "\n" not in str(error), error
        tell(deeds[at] if len(deeds) > at else "")

    code, deed = forked(work)
    assert code == 0, f"it ended with {code}"
    return deed


def deeds_of(world: World, name: str, way: str, folder: Path) -> dict[str, list[str]]:
    """End ``name`` at each of its deeds."""
    deeds: list[str] = []
    wrong: list[str] = []
    act, end = ACTIONS[name], killed if way == "kill" else filled
    for at in itertools.count():
        path = world.copy(folder / f"{name}-{at}")
        try:
            deed = end(world, act, path, at)
            check(world, path, name)
            with contextlib.suppress(ValueError):  # such as a run that is there already
                act(world, path)
            check(world, path, name)
        except Exception as error:
            traceback.print_exc()
            wrong.append(f"{at}: {type(error).__name__}: {error}")
            deed = "?"
        shutil.rmtree(path.parent)
        if not deed or len(wrong) == 3:
            return {"deeds": deeds, "wrong": wrong}
        deeds.append(deed)
    raise AssertionError


def main() -> None:
    folder, way = Path(sys.argv[1]), sys.argv[2]
    world = World(folder)
    sys.stdout.write(json.dumps({name: deeds_of(world, name, way, folder) for name in ACTIONS}) + "\n")


if __name__ == "__main__":
    main()

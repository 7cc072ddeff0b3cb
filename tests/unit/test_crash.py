"""kill -9 of the worker, of what it lives for (ComfyUI, or what stands in for it) and of both, at random instants.

``FLUX_FFT_KILLS=500`` kills more often than the 50 times of every day. How many fell into a step, a save and an export
is printed: each at least a fifth, since the instants are steered by what lies on the disk at the time.
"""

import hashlib
import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from workers import make, wait_for
from zygote import Zygote, alive, kill

from trainer.live.session import Session
from trainer.loop import Trainer
from trainer.run import RunDirectory, RunLocked
from trainer.runs import find_runs
from trainer.saves import savepoints

KILLS = int(os.environ.get("FLUX_FFT_KILLS", "50"))
KINDS = ("step", "save", "export")
VICTIMS = ("worker", "parent", "both")
SETTINGS = {"recipe": {"batch_size": 3, "save_every_steps": 2}, "optimizer": {"weight_precision": "split"}}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode())
        whole.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def loaded(trainer: Trainer) -> str:
    """Hash of all that an engine holds: weights, residuals, moments."""
    return digest({f"{s.name}.{g.label}.{name}": t for s in trainer.stages for g in s.arena.groups
                   for name, t in {"weight": g.current, **g.storage}.items()})


def stored(point: Path) -> str:
    """The same of a save point's files, read by themselves."""
    return digest({f"{f.stem}.{name}": t for f in point.glob("*.safetensors") for name, t in load_file(f).items()})


class Reference:
    """The same training without any interruption: what its state is at each step, and its losses."""

    def __init__(self, run: RunDirectory) -> None:
        self._trainer = Trainer(run.config, run.path, dataset=run.dataset)
        self._hashes, self.losses = {0: loaded(self._trainer)}, {}

    def at(self, step: int) -> str:
        while self._trainer.step < step:
            report = self._trainer.train_step()
            self.losses[report.step] = report.loss
            self._hashes[report.step] = loaded(self._trainer)
        return self._hashes[step]


class Campaign:
    """One run, killed again and again."""

    def __init__(self, run: RunDirectory, exports: Path, zygote: Zygote, seed: int) -> None:
        self.run, self.zygote, self.draw = run, zygote, random.Random(seed)
        self.export = exports / "model.safetensors"
        self.fell: dict[str, int] = {kind: 0 for kind in KINDS}
        self.lasted = {"save": 0.05, "export": 0.02, "step": 0.1}

    def under_way(self) -> str:
        """What the worker is at, by what lies on the disk."""
        if any(name.startswith(".part-step") for name in os.listdir(self.run.path / "state")):
            return "save"
        if any(name.endswith(".part") or name.startswith(".part") for name in os.listdir(self.export.parent)):
            return "export"
        return "step"

    def start(self, launch: bool) -> tuple[int, int]:
        """A worker in training, and its parent. ``launch``: the parent starts it, as ComfyUI does."""
        if not launch:
            self.zygote.fork("worker", self.run.path)
            wait_for(self.run.worker_alive, 60)
        parent = self.zygote.fork("owner", self.run.path, self.export, launch)
        first = len(self.run.events())
        wait_for(lambda: [e for e in self.run.events()[first:] if e["type"] == "step"], 90)
        return self.pid(), parent

    def pid(self) -> int:
        return json.loads(self.run.address_file.read_text(encoding="utf-8"))["pid"]

    def strike(self, victim: str, wanted: str, worker: int, parent: int) -> str:
        """Kill at a random instant while ``wanted`` is under way, or after; says what was."""
        deadline = time.monotonic() + 30
        while self.under_way() != wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        begun = time.monotonic()
        until = begun + self.draw.uniform(0, self.lasted[wanted])
        while time.monotonic() < until and self.under_way() == wanted:
            time.sleep(0.001)
        if time.monotonic() < until:  # it is over: so long it lasts
            self.lasted[wanted] = max(0.004, 0.7 * self.lasted[wanted] + 0.3 * (time.monotonic() - begun))
        at = self.under_way()
        kill(*{"worker": (worker,), "parent": (parent,), "both": (worker, parent)}[victim])
        return at if victim == "parent" else self.under_way()  # what is left there tells for sure


def test_kills_at_random_instants_lose_nothing_but_what_came_after_the_last_save_point(tiny, tmp_path, capsys):
    run, other = make(tiny, **SETTINGS), make(tiny, name="other", **SETTINGS)
    reference, exports, zygote = Reference(other), tmp_path / "exports", Zygote()
    exports.mkdir()
    campaign = Campaign(run, exports, zygote, seed=KILLS)
    killed: dict[str, int] = {victim: 0 for victim in VICTIMS}
    done, left = 0, ()
    try:
        while done < KILLS or min(campaign.fell[kind] for kind in KINDS) < done / 5:
            assert done < 3 * KILLS, f"the instants could not be hit: {campaign.fell}"
            victim = VICTIMS[done % 3]
            wanted = min(KINDS, key=lambda kind: campaign.fell[kind])
            left = worker, parent = campaign.start(launch=done % 10 == 0)
            if done == 1:
                with pytest.raises(RunLocked), run.lock(0.2):
                    pass
                second = zygote.fork("worker", run.path)  # a second worker is refused
                wait_for(lambda pid=second: not alive(pid))
                assert alive(worker) and campaign.pid() == worker
            at = campaign.strike(victim, wanted, worker, parent)
            campaign.fell[at] += 1
            killed[victim] += 1
            done += 1
            if victim == "worker":
                kill(parent)
            wait_for(lambda: not run.locked(), 120, "the lock's fall")  # no stale lock ...
            wait_for(lambda pid=worker: not alive(pid), 120, "the worker's end")  # ... and no orphan
            examine(campaign, reference, victim)
    finally:
        kill(*left)
        zygote.close()
        with capsys.disabled():
            told = ", ".join(f"{count} in {kind}" for kind, count in campaign.fell.items())
            print(f"\nkill -9: {done} ({told}; of worker {killed['worker']}, parent {killed['parent']}, both"
                  f" {killed['both']}); the run is at step {run.status()['resume_step']}")
    assert [p for p in (run.path / "state").iterdir() if not p.name.startswith("step-")] == []
    assert all(campaign.fell[kind] >= done / 5 for kind in KINDS)


def examine(campaign: Campaign, reference: Reference, victim: str) -> None:
    """The run is found, tells the truth, and resumes as one that was never interrupted."""
    (run,) = [found for found in find_runs(campaign.run.path.parent) if found.path == campaign.run.path]
    status, points = run.status(), run.save_points()
    assert not run.worker_alive() and status["worker"] is None
    newest = points[-1].step if points else 0
    if victim == "parent":  # the worker lived on: it has finished its step, saved and gone
        assert status["state"] == "stopped" and status["step"] == newest
    else:
        assert status["state"] == "interrupted" and newest <= status["step"]
    assert status["resume_step"] == newest
    told = dict(run.losses())
    reference.at(status["step"])
    assert told == {step: reference.losses[step] for step in range(1, status["step"] + 1)}
    for point in points:
        assert savepoints.verify(point.path) == []
    if campaign.export.exists():  # whole, whenever it was made
        with safe_open(campaign.export, "pt") as file:
            step = int(file.metadata()["flux_fft.steps"])
            assert step >= 1 and all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118

    with run.lock():  # what was left half-written goes
        one = Session(run)
        one.begin()
        trainer = one.load()
        assert trainer.step == newest
        found = loaded(trainer)
        assert found == reference.at(newest)
        if points:
            assert found == stored(points[-1].path)
        assert campaign.under_way() != "save"
    for leftover in campaign.export.parent.glob("*.part*"):  # of an export, which only takes its name when whole
        leftover.unlink()

"""Death, and a full disk, at every write, flush, rename and removal: what is left is whole, and the run goes on."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trainer import files
from trainer.run import RunDirectory
from trainer.weights import write_safetensors

HELPER = Path(__file__).resolve().parents[1] / "helpers" / "deaths.py"
LEAST = {
    "save": 55, "write_checkpoint": 50, "write_checkpoint_again": 50, "roll_back": 8, "roll_back_to_a_checkpoint": 5,
    "roll_back_to_the_beginning": 10, "fall_back": 5, "create": 14, "create_in_place": 16, "update": 8, "append": 3,
    "delete": 2,
}  # fmt: skip
"""At how many deeds, at least, each of these is ended: a test that ends nothing would pass too."""


@pytest.fixture(scope="module", params=["kill", "full"])
def ended(request):
    """What was left by each action, ended in one way."""
    if not hasattr(os, "fork"):
        pytest.skip("processes are forked here")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nothing here has to outlive a power cut
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, str(HELPER), folder, request.param], env=environment,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("action", LEAST)
def test_at_each_deed(ended, action):
    found, said = ended
    assert found.keys() == LEAST.keys()
    assert found[action]["wrong"] == [], said[-3000:]
    assert len(found[action]["deeds"]) >= LEAST[action], found[action]["deeds"]


# -- power cuts: what was written but not flushed may be lost, and renames that were not


class Order:
    """The deeds in their order; ``lost`` names what a power cut could lose though something relies on it."""

    def __init__(self, monkeypatch) -> None:
        self.dirty: set[Path] = set()
        self.seen: set[Path] = set()
        self.made: set[Path] = set()
        """Files whose names the disk may not have yet."""
        self.renamed: set[Path] = set()
        self.lost: list[str] = []
        self.deeds: list[str] = []
        monkeypatch.setattr(files, "failpoint", self)

    def __call__(self, deed: str, path: Path) -> None:
        self.deeds.append(f"{deed} {path.name}")
        if deed == "write":
            self.dirty.add(path)
            self.made |= {path} - self.seen
            self.seen.add(path)
        elif deed == "sync":
            self.dirty.discard(path)
            self.made = {p for p in self.made if p.parent != path}
            self.renamed = {p for p in self.renamed if p.parent != path}
        elif deed == "rename":
            if not path.name.startswith(files.PART):  # what is on its way out needs no order
                self.lost += [f"{p.name} is not on the disk when {path.name} gets its name" for p in self.dirty]
                inside = str(path.with_name(files.PART + path.name))
                self.lost += [f"{p.name} is not sure to be in {path.name}" for p in self.made
                              if str(p.parent).startswith(inside)]
                self.renamed.add(path)
        elif deed == "remove":
            self.lost += [f"{p.name} is not sure to be there when {path.name} goes" for p in self.renamed]


def test_nothing_gets_its_name_or_its_forerunner_lost_before_it_is_on_the_disk(tiny, monkeypatch):
    from trainer.loop import Trainer

    def with_a_folder(part: Path) -> None:
        (part / "inside").mkdir()
        with open(part / "inside" / "a", "xb", buffering=0) as file:
            files.write(file, b"a")

    config, folder, manifest = tiny(optimizer={"weight_precision": "split"})
    order = Order(monkeypatch)
    run = RunDirectory.create(folder, config, manifest)
    trainer = Trainer(config, folder, dataset=manifest)
    with run.lock():
        for step in (1, 2):
            trainer.step = step
            run.write_save_point(step, trainer.save)
            run.append("saved", durable=True, step=step, seconds=1.0)
            run.write_checkpoint(step, trainer.entries("bf16"), {}, keep=1)
        run.write_save_point(3, with_a_folder)
        run.take_back(run.find_source(2, fresh=True))
    write_safetensors(folder / "model.safetensors", trainer.entries("bf16"))
    run.update(run.config, {**manifest, "fingerprint": "e" * 64})
    assert order.lost == [] and not order.renamed
    assert sum(deed.startswith("rename") for deed in order.deeds) >= 10
    assert sum(deed.startswith("remove") for deed in order.deeds) >= 4


def test_the_order_is_looked_at(tmp_path, monkeypatch):
    """The test above would notice: a write that is not flushed, a name that is not, before others rely on it."""
    order = Order(monkeypatch)
    with open(tmp_path / "a", "wb", buffering=0) as file:
        files.write(file, b"x")
    files.replace(tmp_path / "a", tmp_path / "b")
    files.unlink(tmp_path / "c")
    assert len(order.lost) == 2


def test_deeds_cost_nothing_where_nobody_watches(tmp_path):
    assert files.failpoint is None
    files.write_json(tmp_path / "a.json", {"a": 1})
    assert files.read_json(tmp_path / "a.json") == {"a": 1}

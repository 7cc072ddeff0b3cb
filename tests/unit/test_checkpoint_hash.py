"""Weights-only checkpoints hold the hash of their data: damage is found, and what has no hash is not called damaged."""

import hashlib
import json
import os

import pytest
import torch
from commands import here
from safetensors import safe_open
from sessions import recipe, session
from workers import make

from trainer.export.reread import compare
from trainer.files import Damaged
from trainer.header import HASH, NO_HASH, read_header
from trainer.saves import weights_only
from trainer.weights import entry, write_safetensors


@pytest.fixture
def trained(tiny):
    run = make(tiny, **recipe(checkpoint_every_steps=2, save_every_steps=1, keep_save_points=9))
    one = session(run)
    for _ in range(3):
        one.step()
    return run, one


def verified(run) -> dict[str, dict]:
    return {one["file"]: one for one in json.loads(here("verify", run.path, "--json").stdout)["saved"]}


def flip(path) -> None:
    with open(path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 4]))


def test_the_hash_is_that_of_the_data_by_modelspec(trained):
    run, one = trained
    (found,) = run.checkpoints()
    header = read_header(found.path)
    data = found.path.read_bytes()[header.data_start :]
    assert header.metadata["modelspec.hash_sha256"] == f"0x{hashlib.sha256(data).hexdigest()}"
    assert weights_only.verify(found.path) == []
    assert not list(found.path.parent.glob("*.part"))


def test_verify_reads_checkpoints_too_and_finds_one_bit(trained):
    run, _ = trained
    (found,) = run.checkpoints()
    name = found.path.relative_to(run.path).as_posix()
    assert verified(run)[name] == {"file": name, "step": 2, "problems": [], "hashed": True}
    assert here("verify", run.path).returncode == 0
    flip(found.path)
    told = here("verify", run.path)
    assert told.returncode == 1 and f"{name}: " in told.stdout and "not as it was written" in told.stdout


def test_one_without_a_hash_is_not_called_damaged(trained):
    run, _ = trained
    (found,) = run.checkpoints()
    with safe_open(found.path, "pt") as file:
        about = {k: v for k, v in file.metadata().items() if k != "modelspec.hash_sha256"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    write_safetensors(found.path, [entry(k, t) for k, t in tensors.items()], about)
    flip(found.path)
    name = found.path.relative_to(run.path).as_posix()
    assert verified(run)[name]["problems"] == [] and not verified(run)[name]["hashed"]
    assert "an older version" in here("verify", run.path).stdout
    save = run.save_points()[0].path / "save.json"
    save.write_text(json.dumps({k: v for k, v in json.loads(save.read_text()).items() if k != "sha256"}))
    assert not verified(run)[save.parent.relative_to(run.path).as_posix()]["hashed"]


@pytest.mark.parametrize("live", [True, False])
def test_a_damaged_checkpoint_is_not_gone_back_to(trained, live):
    run, one = trained
    run.save_points()[1].path.rename(run.path / "away")  # of step 2 there is only the checkpoint
    (found,) = run.checkpoints()
    flip(found.path)
    with pytest.raises(Damaged, match="not as it was written"):
        one.roll_back(2, fresh=True) if live else run.roll_back(2, fresh=True)
    assert run.status()["step"] == 3 and not live or one.trainer.step == 3 and not one.trainer.torn


def test_a_whole_one_is(trained):
    run, one = trained
    run.save_points()[1].path.rename(run.path / "away")
    assert one.roll_back(2, fresh=True) == 2


def test_hashing_beside_the_writing_gives_the_same_file(tmp_path):
    big = [entry("a", torch.arange(100_000.0)), entry("b", torch.ones(3, dtype=torch.bfloat16))]
    about = {"x": "y", HASH: NO_HASH}
    write_safetensors(tmp_path / "plain.safetensors", big, about, chunk_bytes=4096)
    write_safetensors(tmp_path / "hashed.safetensors", big, about, chunk_bytes=4096, hashed=True)
    plain, header = (tmp_path / "plain.safetensors").read_bytes(), read_header(tmp_path / "hashed.safetensors")
    digest = f"0x{hashlib.sha256(plain[header.data_start:]).hexdigest()}"
    assert digest == f"0x{compare(tmp_path / 'plain.safetensors', big, about)}"
    assert (tmp_path / "hashed.safetensors").read_bytes() == plain.replace(NO_HASH.encode(), digest.encode())
    assert header.metadata == {"x": "y", HASH: digest} and header.hashed


def test_verify_reads_each_header_once(trained, monkeypatch):
    run, _ = trained
    (found,) = run.checkpoints()
    read = []
    monkeypatch.setattr(weights_only, "read_header", lambda path: (read.append(path), read_header(path))[1])
    assert weights_only.look(found.path) == ([], True)
    assert read == [found.path]

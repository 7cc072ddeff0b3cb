"""The torch optimizers' states: saved, loaded, gone on with bit for bit, on another device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from states import same
from torch import nn
from zoo import OPTIMIZERS, Zoo, contents, give_gradients

from trainer.optim import (
    STATE_FORMATS,
    AdamOffload,
    NAdamOffload,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("state_format", [*STATE_FORMATS, {"exp_avg": "int8", "exp_avg_sq": "f24"}])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_saving_and_loading_changes_no_bit(name: str, state_format: Any, tmp_path: Path) -> None:
    """Stepping on, or loading into a fresh optimizer (from a file, from a state_dict) and then stepping: the same."""

    def build(module: nn.Module, **settings: Any) -> Any:
        settings = {"lr": 1e-3, "weight_decay": 0.01, "clip": "previous", "max_norm": 0.05, **settings}
        kept = {"state_format": state_format, "weight_precision": "stochastic"}
        return OPTIMIZERS[name](module.parameters(), **kept, **settings)

    module = Zoo()
    optimizer = build(module, seed=5)
    for step in range(3):
        give_gradients(module, step)
        optimizer.step()
    optimizer.save(tmp_path / "states.safetensors")
    packed, weights = optimizer.state_dict(), {k: v.clone() for k, v in module.state_dict().items()}
    packed = {**packed, "state": {i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
                                  for i, s in packed["state"].items()}}  # fmt: skip

    def go_on(module: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
        for step in range(3, 6):
            give_gradients(module, step)
            optimizer.step()
        return contents(module, optimizer)

    expected = go_on(module, optimizer)
    for load in ("file", "state_dict"):
        module = Zoo()
        module.load_state_dict(weights)
        optimizer = build(module, lr=7.0, seed=99)
        if load == "file":
            optimizer.load(tmp_path / "states.safetensors")
        else:
            optimizer.load_state_dict(packed)
        assert same(go_on(module, optimizer), expected), load

NEW_PROCESS = """
import sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/helpers"]
from zoo import OPTIMIZERS, Zoo, contents, give_gradients
module = Zoo()
module.load_state_dict(torch.load(sys.argv[2] + "/weights.pt"))
optimizer = OPTIMIZERS[sys.argv[3]](module.parameters(), state_format=sys.argv[4])
optimizer.load(sys.argv[2] + "/states.safetensors")
give_gradients(module, 7)
optimizer.step()
torch.save(contents(module, optimizer), sys.argv[2] + "/after.pt")
"""


@pytest.mark.parametrize(("name", "state_format"), [("NAdamOffload", "log16"), ("AdanOffload", "f24")])
def test_a_new_process_goes_on_bit_for_bit(name: str, state_format: str, tmp_path: Path) -> None:
    module = Zoo()
    optimizer = OPTIMIZERS[name](module.parameters(), lr=1e-4, state_format=state_format)
    for step in range(2):
        give_gradients(module, step)
        optimizer.step()
    optimizer.save(tmp_path / "states.safetensors")
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    arguments = [sys.executable, "-c", NEW_PROCESS, str(ROOT), str(tmp_path), name, state_format]
    subprocess.run(arguments, check=True, timeout=120)
    give_gradients(module, 7)
    optimizer.step()
    assert same(torch.load(tmp_path / "after.pt"), contents(module, optimizer))


def test_a_file_of_something_else_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    module = Zoo()
    optimizer = NAdamOffload(module.parameters(), lr=1e-3)
    give_gradients(module, 0)
    optimizer.step()
    path = tmp_path / "states.safetensors"
    optimizer.save(path)
    before = contents(module, optimizer)
    others = {
        "AdamOffload": lambda: AdamOffload(Zoo().parameters()),
        "parameter groups": lambda: NAdamOffload(nn.Linear(2, 2).parameters()),
        "otherwise": lambda: NAdamOffload([*reversed(list(Zoo().parameters()))]),
    }
    for words, make in others.items():
        with pytest.raises(ValueError, match=words):
            make().load(path)
    with pytest.raises(ValueError, match="save"):
        (tmp_path / "x.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        optimizer.load(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="state_dict"):
        optimizer.load_state_dict(torch.optim.Adam(Zoo().parameters()).state_dict())
    assert same(before, contents(module, optimizer))


@pytest.mark.parametrize("state_format", STATE_FORMATS)
@pytest.mark.parametrize("name", ["NAdamOffload", "AdanOffload"])
def test_states_that_cross_over_come_home(name: str, state_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for parameters on a GPU: copies of chunks are updated and written back, and not a bit differs."""
    results = []
    settings = {"lr": 1e-3, "state_format": state_format}
    if name == "NAdamOffload":
        settings |= {"cautious": True, "cautious_rescale": True}
    for crossing in (False, True):
        if crossing:
            monkeypatch.setattr("trainer.optim.offload._crosses", lambda *_: True)
            monkeypatch.setattr("trainer.optim.offload._to", lambda _, s: {k: v.clone() for k, v in s.items()})
            if state_format != "u16pow":
                monkeypatch.setattr("trainer.optim.offload.CROSSING", 1024)
        module = Zoo()
        optimizer = OPTIMIZERS[name](module.parameters(), **settings)
        for step in range(3):
            give_gradients(module, step)
            optimizer.step()
        results.append(contents(module, optimizer))
    assert same(*results)

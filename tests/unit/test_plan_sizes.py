"""The plan's sizes against the real engine, and what a process really takes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_streams import FakeStreams
from states import ADAN

from trainer.config import (
    STATE_FORMATS,
    WEIGHT_PRECISIONS,
    OptimizerConfig,
)
from trainer.flux.model import TINY, FluxParams, build_meta
from trainer.loop import Trainer
from trainer.memory import alternatives, footprint
from trainer.memory.pools import Pool
from trainer.optim.base import make_storage, spec_from_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("params", [FluxParams(), TINY, FluxParams(guidance_embed=False), FluxParams(qkv_bias=False)])
def test_stages_hold_every_parameter(params):
    sizes = {n: (-(-p.numel() // 256) * 256, p.itemsize) for n, p in build_meta(params).named_parameters()}
    stages = footprint.stage_sizes(dataclasses.asdict(params), OptimizerConfig())
    assert len(stages.body) == params.depth + params.depth_single_blocks
    assert stages.numel == sum(numel for numel, _ in sizes.values())
    assert stages.weight == sum(numel * size for numel, size in sizes.values())
    head = [numel for name, (numel, _) in sizes.items() if name.startswith("final_layer.")]
    assert stages.all[-1].numel == sum(head)


def test_flux_dev_has_its_published_size():
    assert sum(p.numel() for p in build_meta(FluxParams()).parameters()) == 11_901_408_320


@pytest.mark.parametrize("kind", [{}, ADAN])
@pytest.mark.parametrize("state_format", STATE_FORMATS)
@pytest.mark.parametrize("precision", WEIGHT_PRECISIONS)
def test_state_bytes_are_those_of_the_storage(kind, precision, state_format):
    config = OptimizerConfig(**kind, weight_precision=precision, state_format=state_format)
    dtype = torch.float32 if precision == "f32" else torch.bfloat16
    storage = make_storage(spec_from_config(config, 0), 1 << 20, dtype, "cpu")
    real = sum(t.numel() * t.element_size() for t in storage.values()) / (1 << 20)
    assert alternatives.state_bytes(config) == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"state_format": "f32"}, 10),
        ({"state_format": "f24"}, 8),
        ({}, 6 + 8 / 256),  # log16: a float32 scale for each block of 256, of each moment
        ({"state_format": "int8", "weight_precision": "stochastic"}, 2 + 8 / 256),
        ({**ADAN, "weight_precision": "stochastic"}, 8 + 12 / 256),
        (ADAN, 10 + 12 / 256),
    ],
)
def test_the_designs_bytes_per_parameter(settings, expected):
    assert alternatives.state_bytes(OptimizerConfig(**settings)) == pytest.approx(expected)


@pytest.mark.parametrize("ema", [0.0, 0.99])
@pytest.mark.parametrize("swap", [0, 1, 3, 6])
@pytest.mark.parametrize("offload", ["on", "off"])
def test_the_engine_takes_what_is_planned(tiny, monkeypatch, swap, offload, ema):
    """Byte for byte, what the pools make and what is copied in a step."""
    monkeypatch.setattr("trainer.memory.arena.CHUNK", 1 << 15)
    monkeypatch.setattr("trainer.memory.conveyor.RING_BYTES", 1 << 20)
    footprint._stage_sizes.cache_clear()
    made, copied, make = {}, {"up": 0, "down": 0}, Pool.make

    def counting(pool, shape):
        buffer = make(pool, shape)
        names = {name for name, _, _ in shape}
        kind = "weights" if names == {"weight"} else "inputs" if names <= {"0", "1", "bytes"} else "states"
        made[pool, kind] = made.get((pool, kind), 0) + sum(t.nbytes for t in buffer.tensors.values())
        return buffer

    class Counting(FakeStreams):
        def copy(self, stream, target, source):
            copied[stream] += target.nbytes
            super().copy(stream, target, source)

    monkeypatch.setattr(Pool, "make", counting)
    params = FluxParams(**{**TINY.__dict__, "depth": 2, "depth_single_blocks": 4})
    config, folder, manifest = tiny(
        params=params,
        shapes=[(8, 8)] * 4,
        optimizer={"weight_precision": "split"},
        memory={"blocks_to_swap": swap, "activation_offload": offload, "micro_batch": 2},
        recipe={"batch_size": 4, "ema_decay": ema},
    )
    trainer = Trainer(config, folder, dataset=manifest, streams=Counting())
    trainer.train_step()
    copied.update(up=0, down=0)
    trainer.train_step()
    tokens = 16 + trainer.data.captions([0], [False])[0].shape[1]
    stages = footprint.stage_sizes(dataclasses.asdict(params), config.optimizer, ema=ema > 0)
    size = footprint.footprint(stages, swap=swap, offload=offload == "on", on_gpu=True, pictures=4, micro=2,
                               tokens=tokens, hidden=128, compute=2)  # fmt: skip
    host, device = trainer.conveyor.host, trainer.conveyor.device
    assert sum(made.get((host, kind), 0) for kind in ("states", "inputs")) == size.pinned
    assert made[device, "weights"] == size.vram["resident weights"] + size.vram["weight slots"]
    assert made[device, "states"] == size.vram["state slots"]
    assert made.get((device, "inputs"), 0) <= size.vram["block inputs"]
    gradients = sum(4 * n for n in trainer.conveyor._gradient_sizes.values())
    assert gradients == size.vram["gradients of one block"]
    assert (copied["up"], copied["down"]) == (size.up, size.down)
    if ema:
        before = dict(made)
        trainer.predict(torch.randn(1, 16, 8, 8), torch.ones(1), *trainer.data.captions([0], [False]), None, ema=True)
        new = {kind: made[device, kind] - before[device, kind] for kind in ("weights", "states")}
        kinds = {shape for s in trainer.stages for g in s.arena.groups for shape in [g.weight_layout]}
        assert new["weights"] <= sum(g[0][1].itemsize * g[0][2][0] for g in kinds)
        assert new["states"] <= len(kinds) * size.vram["average on its way"]


def test_activations_of_a_block_are_those_of_autograd():
    """The peak of new memory in the backward pass of a block, per token and hidden unit."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.meter import Meter
    from trainer.flux.model import init_weights_

    params, n, t = FluxParams(hidden_size=256, num_heads=2, depth=1, depth_single_blocks=1), 2048, 256
    model = init_weights_(build_meta(params).to_empty(device="cpu").requires_grad_(True), 0)
    rope, vec = model.rope(64, 128, t), torch.randn(1, 256, dtype=torch.bfloat16)
    img, txt = (torch.randn(1, length, 256, dtype=torch.bfloat16, requires_grad=True) for length in (n, t))
    for run in (lambda: model.double_blocks[0](img, txt, vec, rope),
                lambda: (model.single_blocks[0](torch.cat((txt, img), 1), vec, rope),)):  # fmt: skip
        parameters = [p for p in model.parameters()]
        with Meter() as meter:
            out = run()
            torch.autograd.grad(out, [img, txt, *parameters], [torch.ones_like(o) for o in out], allow_unused=True)
        assert meter.peak / ((n + t) * 256 * 2) < footprint.ACTIVATIONS


@pytest.mark.slow
def test_the_plan_is_within_5_percent_of_what_a_process_takes(tmp_path):
    """The truth test: 0.3 B parameters, a fresh process, peak growth of its resident memory."""
    done = subprocess.run([sys.executable, ROOT / "tests" / "helpers" / "truth.py", str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    wrong = abs(result["planned"] - result["measured"])
    assert wrong <= max(0.05 * result["measured"], 200e6), result

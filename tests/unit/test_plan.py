"""The plan: its sizes against the real engine, its reference points, its decisions."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_streams import FakeStreams

from trainer.cli import plan as plan_cli
from trainer.config import (
    STATE_FORMATS,
    WEIGHT_PRECISIONS,
    DatasetConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
)
from trainer.flux.model import TINY, FluxParams, build_meta
from trainer.flux.variants import FileInfo
from trainer.loop import Trainer
from trainer.memory import alternatives, disk, footprint, machine, plan
from trainer.memory.pools import Pool
from trainer.optim.base import make_storage, spec_from_config

ROOT = Path(__file__).resolve().parents[2]
ADAN = {"kind": "adan", "betas": (0.98, 0.92, 0.99)}
SQUARE = [(128, 128)]
DEV = dataclasses.asdict(FluxParams())


def info(params: dict = DEV) -> FileInfo:
    return FileInfo(path="flux.safetensors", kind="flux", trainable=True, variant="dev", dtype="bf16", flux=params)


def planned(
    vram: float, ram: float, *, memory: dict | None = None, optimizer: dict | None = None, **recipe
) -> plan.Plan:
    config = RunConfig(
        name="r",
        model=ModelConfig(flux="f"),
        dataset=DatasetConfig(folder="d"),
        optimizer=OptimizerConfig(**(optimizer or {})),
        recipe=RecipeConfig(**recipe),
        memory=MemoryConfig(**(memory or {})),
    )
    return plan.resolve(config, info(), SQUARE, machine.given(vram, ram))


def asked(capsys, *arguments: str) -> dict:
    """What ``python -m trainer plan`` answers."""
    from trainer.cli.main import main

    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


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


REFERENCE = [  # VRAM, RAM, batch, optimizer, whether it fits
    (32, 128, 5, {"state_format": "f24"}, True),
    (32, 128, 5, {}, True),
    (32, 128, 5, {**ADAN, "weight_precision": "stochastic"}, True),
    (32, 128, 5, ADAN, False),
    (32, 64, 5, {"state_format": "int8", "weight_precision": "stochastic"}, True),
    (32, 64, 5, {}, False),
    (24, 128, 5, {}, True),
    (24, 64, 1, {"state_format": "int8", "weight_precision": "stochastic"}, True),
]


@pytest.mark.parametrize("vram, ram, batch, optimizer, fits", REFERENCE)
def test_the_reference_points(vram, ram, batch, optimizer, fits):
    assert planned(vram, ram, optimizer=optimizer, batch_size=batch).fits is fits
    assert planned(80, 200, optimizer=optimizer, batch_size=batch).fits


def test_a_small_card_offloads_activations():
    small = planned(24, 128)
    assert small.fits and small.activation_offload and small.vram_gb <= 23


def test_more_vram_never_swaps_more():
    swaps = [planned(vram, 256).blocks_to_swap for vram in (16, 20, 24, 32, 48, 80)]
    assert swaps == sorted(swaps, reverse=True) and swaps[-1] == 0


def test_swapping_more_never_takes_more_vram():
    stages = footprint.stage_sizes(DEV, OptimizerConfig())
    for offload in (False, True):
        sizes = [
            footprint.footprint(stages, swap=swap, offload=offload, on_gpu=True, pictures=5, micro=5, tokens=4608,
                                hidden=3072, compute=2).vram
            for swap in range(58)
        ]  # fmt: skip
        totals = [sum(size.values()) for size in sizes]
        assert totals == sorted(totals, reverse=True)


def test_a_large_card_keeps_all_and_a_small_one_says_what_to_do():
    large = planned(80, 256)
    assert large.fits and large.blocks_to_swap == 0 and not large.activation_offload
    small = planned(16, 256)
    assert not small.fits and small.blocks_to_swap == 57 and "micro_batch 1" in small.reasons[-1]
    assert planned(16, 256, memory={"micro_batch": 1}).fits
    assert "no setting" in planned(4, 256).reasons[-1]


def test_too_little_ram_is_said_with_what_would_fit_the_best_first():
    poor = planned(32, 128, optimizer=ADAN)
    assert "GiB of RAM" in poor.reasons[1] and poor.ram_gb > 128
    assert "log16 with weight_precision stochastic" in poor.reasons[2]
    assert "int8 with weight_precision split" in poor.reasons[3]
    poorer = planned(32, 64)
    assert "int8 with weight_precision stochastic" in poorer.reasons[-1]


def test_what_is_said_to_fit_does():
    for vram, ram, optimizer in ((32, 64, {}), (12, 64, {}), (32, 100, ADAN), (16, 48, {})):
        told = planned(vram, ram, optimizer=optimizer).reasons
        for changed in told:
            if "would fit" not in changed:
                continue
            words, settings, recipe, memory = changed.split(), dict(optimizer), {}, {}
            if "NAdam" in changed:
                settings = {}
            if "state_format" in words:
                settings["state_format"] = words[words.index("state_format") + 1]
                settings["weight_precision"] = words[words.index("weight_precision") + 1].strip(",")
            if "batch_size 1" in changed:
                recipe["batch_size"] = 1
            if "micro_batch 1" in changed:
                memory["micro_batch"] = 1
            if "half the resolution" not in changed:
                assert planned(vram, ram, optimizer=settings, memory=memory, **recipe).fits, changed


def test_spare_vram_and_ram_settle_where_activations_wait():
    assert not planned(32, 128, optimizer={"state_format": "f24"}).activation_offload  # no RAM to spare
    assert planned(32, 256, optimizer={"state_format": "f24"}).activation_offload


def test_what_the_user_sets_is_kept():
    chosen = planned(80, 256, memory={"blocks_to_swap": 30, "activation_offload": "on", "micro_batch": 1})
    assert (chosen.blocks_to_swap, chosen.activation_offload, chosen.micro_batch) == (30, True, 1)
    assert planned(80, 256, memory={"blocks_to_swap": 999}).blocks_to_swap == 57


def test_items_add_up():
    found = planned(24, 128)
    vram = sum(v for k, v in found.items.items() if k.startswith("GPU: ") and "left to" not in k)
    ram = sum(v for k, v in found.items.items() if not k.startswith(("GPU: ", "disk: ", "left to")))
    disk = sum(v for k, v in found.items.items() if k.startswith("disk: "))
    assert vram == pytest.approx(found.vram_gb, abs=0.02) and ram == pytest.approx(found.ram_gb, abs=0.02)
    assert disk == pytest.approx(found.disk_gb, abs=0.02) and found.pinned_gb < found.ram_gb


def test_what_cannot_be_pinned_is_told():
    config = RunConfig(name="r", model=ModelConfig(flux="f"), dataset=DatasetConfig(folder="d"))
    found = plan.resolve(config, info(), SQUARE, machine.given(32, 128, windows=True))
    assert found.fits and found.pinned_gb == pytest.approx(51.2, abs=0.1) and "51 of 101 GiB" in found.reasons[-1]


def test_the_plan_keeps_within_what_it_was_given():
    for vram in (24, 32, 48):
        assert planned(vram, 256).vram_gb <= vram - 1


def test_micro_batches_and_small_batches_take_less():
    assert planned(80, 256, memory={"micro_batch": 1}).vram_gb < planned(80, 256).vram_gb
    assert planned(80, 256, batch_size=1).vram_gb < planned(80, 256).vram_gb


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


def test_a_missing_gpu_is_named():
    if torch.cuda.is_available():
        index = torch.cuda.device_count()
        with pytest.raises(ValueError, match=f"cuda:{index}"):
            plan.this_machine(f"cuda:{index}", 0)
    else:
        with pytest.raises(ValueError, match="no GPU here"):
            plan.this_machine("cuda", 0)
        assert plan.this_machine("auto", 0).device == "cpu"


def test_the_command_answers_with_all_fields(capsys):
    found = asked(capsys, "--preset", "flux-dev", "--vram", "32", "--ram", "128")
    assert {"fits", "vram_gb", "ram_gb", "pinned_gb", "disk_gb", "blocks_to_swap", "state_format", "weight_precision",
            "activation_offload", "items", "reasons", "step_seconds", "waits_for"} <= found.keys()  # fmt: skip
    assert (found["state_format"], found["weight_precision"]) == ("log16", "split") and found["fits"]
    more = asked(capsys, "--preset", "flux-dev", "--vram", "80", "--ram", "512")
    assert (more["state_format"], more["weight_precision"]) == ("log16", "split")  # nothing larger unasked
    less = asked(capsys, "--preset", "flux-dev", "--vram", "32", "--ram", "64")
    assert less["fits"] and (less["state_format"], less["weight_precision"]) == ("int8", "stochastic")
    asked_for = asked(capsys, "--preset", "flux-dev", "--vram", "32", "--ram", "64", "--state-format", "log16")
    assert not asked_for["fits"] and asked_for["state_format"] == "log16"


def test_the_command_gives_seconds_where_speeds_are_known(capsys, tmp_path):
    slow = ["--preset", "flux-dev", "--vram", "32", "--ram", "128", "--tflops", "150", "--h2d", "1", "--d2h", "1"]
    found = asked(capsys, *slow)
    assert found["step_seconds"] > 80 and found["waits_for"] in ("up", "down")
    (tmp_path / "machine.json").write_text(json.dumps({"speeds": {"tflops": 150, "h2d": 50, "d2h": 50}}))
    fast = asked(capsys, *slow[:6], "--speeds", str(tmp_path / "machine.json"))
    assert 9 < fast["step_seconds"] < 15 and fast["waits_for"] == "arithmetic"


def test_the_command_takes_a_file_and_a_run(capsys, tiny, tmp_path):
    from trainer.run import RunDirectory

    config, folder, manifest = tiny()
    by_file = asked(capsys, "--model", config.model.flux, "--vram", "0", "--weight-precision", "f32")
    assert by_file["device"] == "cpu" and by_file["vram_gb"] == 0 and by_file["weight_precision"] == "f32"
    run = RunDirectory.create(tmp_path / "made", dataclasses.replace(config, name="made"), manifest)
    by_run = asked(capsys, str(run.path))
    assert by_run["fits"] and by_run["weight_precision"] == "f32"


@pytest.mark.parametrize(
    "arguments, what",
    [
        ([], "one of"),
        (["--preset", "tiny", "--model", "x"], "one of"),
        (["--preset", "tiny", "--vram", "-1"], "--vram"),
        (["--preset", "tiny", "--resolution", "1"], "resolution"),
        (["--preset", "tiny", "--batch", "0"], "batch_size"),
        (["--preset", "tiny", "--speeds", "nowhere.json"], "nowhere.json"),
    ],
)
def test_the_command_refuses_nonsense_in_one_line(capsys, arguments, what):
    from trainer.cli.main import main

    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


def test_free_memory_counts_the_container(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_cgroups", lambda: [(1 << 30, 1 << 29)])
    assert machine.total_ram() == 1 << 30 and machine.free_ram() == 1 << 29


def test_text_for_people_names_what_matters():
    told = plan_cli.text(planned(24, 128))
    assert "fits on cuda:0" in told and "optimizer states" in told and "blocks wait" in told


def test_json_gives_the_plan_back():
    p = planned(32, 256)
    assert plan.from_dict(plan.to_dict(p)) == p


def test_an_average_takes_two_bytes_more_for_every_parameter_and_is_what_is_given_up_first():
    plain, kept = planned(32, 160), planned(32, 160, ema_decay=0.999)
    assert kept.fits and kept.items["average of the weights"] == pytest.approx(2.016 * 11.9e9 / 2**30, rel=0.01)
    assert kept.disk_gb - plain.disk_gb == pytest.approx(2 * kept.items["average of the weights"], abs=0.1)
    poor = planned(32, 116, ema_decay=0.999)
    assert not poor.fits and "no average of the weights" in next(r for r in poor.reasons if "would fit" in r)
    assert planned(32, 116).fits and planned(32, 128, ema_decay=0.999).fits
    poorer = planned(32, 64, ema_decay=0.999)
    told = [r for r in poorer.reasons if "would fit" in r]
    assert "int8 with weight_precision stochastic" in told[0] and "no average" in told[0]
    assert plan.key(run_of(ema_decay=0.9), SQUARE, "cpu") != plan.key(run_of(), SQUARE, "cpu")


def run_of(**recipe) -> RunConfig:
    return RunConfig(name="r", model=ModelConfig(flux="f"), dataset=DatasetConfig(folder="d"),
                     recipe=RecipeConfig(**recipe))  # fmt: skip


def test_the_disk_is_counted_as_the_settings_fill_it():
    def takes(**recipe) -> dict[str, float]:
        found = planned(32, 128, **recipe).items
        return {name.removeprefix("disk: "): size for name, size in found.items() if name.startswith("disk: ")}

    two, four = takes(), takes(keep_save_points=3)
    assert four["4 save points"] == pytest.approx(2 * two["2 save points"], rel=1e-3)
    assert two["an export"] == pytest.approx(22.17, abs=0.05) and not [n for n in two if "checkpoint" in n]
    few = takes(checkpoint_every_steps=100, keep_checkpoints=2)
    assert few["3 checkpoints"] == pytest.approx(3 * two["an export"], rel=1e-3)
    assert takes(checkpoint_every_steps=100)["1 checkpoint, of each"] == pytest.approx(two["an export"], rel=1e-3)
    assert "all are kept" in planned(32, 128, checkpoint_every_steps=100).reasons[-1]


def test_a_disk_that_is_too_small_is_told_and_does_not_keep_from_training(tmp_path, monkeypatch):
    here = dataclasses.replace(machine.given(32, 128), disk_free=210 << 30)
    assert not [r for r in plan.resolve(run_of(), info(), SQUARE, here).reasons if "disk" in r]
    full = dataclasses.replace(here, disk_free=100 << 30)
    found = plan.resolve(run_of(), info(), SQUARE, full)
    (told,) = [r for r in found.reasons if "disk" in r]
    assert found.fits and "room for 100.0 GiB" in told and f"{found.disk_gb:.1f} GiB" in told
    free = disk.room(tmp_path / "not" / "yet")
    assert free is not None and free > 0
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "old").write_bytes(b"x" * 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=500))
    assert disk.room(tmp_path) == 1500  # what is there makes way


def test_the_command_counts_an_average_in(capsys):
    wide = ["--preset", "flux-dev", "--vram", "32", "--ram", "160", "--state-format", "log16"]
    plain, kept = asked(capsys, *wide), asked(capsys, *wide, "--ema")
    assert kept["ram_gb"] - plain["ram_gb"] > 20 and "average of the weights" in kept["items"]

"""LoRAs merged into the weights before training: every way of spelling them, against arithmetic done by hand.

``tests/comfyui`` compares with ComfyUI's own loading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.config import LoraConfig, RunConfig
from trainer.flux.intake import open_source
from trainer.flux.lora import read_lora
from trainer.flux.model import TINY, build_meta, init_weights_
from trainer.flux.variants import inspect_file, require_flux
from trainer.weights import entry, write_safetensors

SIZES = dataclasses.replace(TINY, hidden_size=256, num_heads=2, depth=2, depth_single_blocks=2)
FLUX = dataclasses.asdict(SIZES)
RANK, C = 4, 256


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.1


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A Flux's file in bf16, and its weights in float32."""
    path = tmp_path_factory.mktemp("flux") / "flux.safetensors"
    model = init_weights_(build_meta(SIZES, torch.bfloat16).to_empty(device="cpu"), 3)
    weights = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    write_safetensors(path, [entry(name, p) for name, p in weights.items()])
    return path, {name: p.float() for name, p in weights.items()}


def write(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    write_safetensors(path, [entry(name, t) for name, t in tensors.items()])
    return path


def merged(flux: tuple, *loras: tuple[Path, float], chunk: int = 1_000_003) -> dict[str, Tensor]:
    """What a training would begin with, where it is not the file's own weights; read in chunks."""
    configs = [LoraConfig(path=str(path), strength=strength) for path, strength in loras]
    found = {}
    with open_source(flux[0], require_flux(flux[0]), configs) as source:
        for name, base in flux[1].items():
            n = base.numel()
            value = torch.cat([source.read(name, i, min(i + chunk, n)) for i in range(0, n, chunk)]).view(base.shape)
            if not torch.equal(value, base):
                found[name] = value - base
    return found


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, change in wanted.items():
        assert torch.allclose(found[name], change, atol=3e-7), (name, (found[name] - change).abs().max())


UP, DOWN = tensor(3 * C, RANK), tensor(RANK, C, seed=1)
QKV = "double_blocks.1.img_attn.qkv"
SPELLINGS = {
    "kohya": ("lora_unet_double_blocks_1_img_attn_qkv.lora_up.weight",
              "lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight"),
    "comfyui": (f"diffusion_model.{QKV}.lora_B.weight", f"diffusion_model.{QKV}.lora_A.weight"),
    "comfyui, kohya's ends": (f"diffusion_model.{QKV}.lora_up.weight", f"diffusion_model.{QKV}.lora_down.weight"),
    "checkpoint": (f"model.diffusion_model.{QKV}.lora_up.weight", f"model.diffusion_model.{QKV}.lora_down.weight"),
    "bare": (f"{QKV}.lora_B.weight", f"{QKV}.lora_A.weight"),
    "peft": (f"base_model.model.{QKV}.lora_B.default.weight", f"base_model.model.{QKV}.lora_A.default.weight"),
    "xlabs": ("double_blocks.1.processor.qkv_lora1.up.weight", "double_blocks.1.processor.qkv_lora1.down.weight"),
    "xlabs, prefixed": ("diffusion_model.double_blocks.1.processor.qkv_lora1.up.weight",
                        "diffusion_model.double_blocks.1.processor.qkv_lora1.down.weight"),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_each_spelling_is_the_same_change(tmp_path: Path, flux, spelling: str, strength: float) -> None:
    up, down = SPELLINGS[spelling]
    path = write(tmp_path / "lora.safetensors", {up: UP, down: DOWN})
    close(merged(flux, (path, strength)), {f"{QKV}.weight": strength * UP @ DOWN})
    assert inspect_file(path).kind == "lora"


PARTS = {
    "diffusers": "transformer.{}.lora_{}.weight",
    "onetrainer": "lora_transformer_{}.lora_{}.weight",
    "lycoris": "lycoris_{}.lora_{}.weight",
    "diffsynth": "{}.lora_{}.weight",
    "old diffusers": "transformer.{}.lora.{}.weight",
}


def spelled(spelling: str, module: str, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    module = module.replace(".", "_") if "_{}" in PARTS[spelling] else module
    ends = {"diffusers": "BA", "diffsynth": "BA"}.get(spelling, ("up", "down"))
    return {PARTS[spelling].format(module, end): t for end, t in zip(ends, (up, down), strict=True)}


@pytest.mark.parametrize("spelling", PARTS)
def test_parts_of_a_matrix_come_to_lie_in_it(tmp_path: Path, flux, spelling: str) -> None:
    a, k, m = (tensor(n, RANK, seed=n) for n in (C, C + 1, 4 * C))
    k = k[:C]
    tensors = spelled(spelling, "transformer_blocks.0.attn.add_k_proj", a, DOWN)
    tensors |= spelled(spelling, "single_transformer_blocks.1.attn.to_v", k, DOWN)
    tensors |= spelled(spelling, "single_transformer_blocks.1.proj_mlp", m, DOWN)
    path = write(tmp_path / "lora.safetensors", tensors)
    qkv, linear1 = torch.zeros(3 * C, C), torch.zeros(7 * C, C)
    qkv[C : 2 * C] = a @ DOWN
    linear1[2 * C : 3 * C] = k @ DOWN
    linear1[3 * C :] = m @ DOWN
    wanted = {"double_blocks.0.txt_attn.qkv.weight": qkv, "single_blocks.1.linear1.weight": linear1}
    close(merged(flux, (path, 1.0)), wanted)


def test_the_last_modulation_changes_its_halves(tmp_path: Path, flux) -> None:
    up = tensor(2 * C, RANK)
    path = write(tmp_path / "a.safetensors", spelled("diffusers", "norm_out.linear", up, DOWN))
    wanted = torch.cat((up[C:], up[:C])) @ DOWN
    close(merged(flux, (path, 1.0)), {"final_layer.adaLN_modulation.1.weight": wanted})
    ours = "lora_unet_final_layer_adaLN_modulation_1"
    path = write(tmp_path / "b.safetensors", {f"{ours}.lora_up.weight": up, f"{ours}.lora_down.weight": DOWN})
    close(merged(flux, (path, 1.0)), {"final_layer.adaLN_modulation.1.weight": up @ DOWN})


def test_a_single_block_of_xlabs(tmp_path: Path, flux) -> None:
    name, proj = "single_blocks.0.processor.qkv_lora", "single_blocks.0.processor.proj_lora"
    wide = tensor(RANK, 5 * C)
    path = write(tmp_path / "a.safetensors", {f"{name}.up.weight": UP, f"{name}.down.weight": DOWN,
                                              f"{proj}.up.weight": UP[:C], f"{proj}.down.weight": wide})  # fmt: skip
    linear1 = torch.zeros(7 * C, C)
    linear1[: 3 * C] = UP @ DOWN
    wanted = {"single_blocks.0.linear1.weight": linear1, "single_blocks.0.linear2.weight": UP[:C] @ wide}
    close(merged(flux, (path, 1.0)), wanted)


ALPHAS = [torch.tensor(8.0), torch.tensor([2.0]), torch.tensor(1.0).bfloat16(), torch.tensor(3)]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alpha_scales_by_the_rank(tmp_path: Path, flux, alpha: Tensor) -> None:
    up, down = SPELLINGS["kohya"]
    path = write(tmp_path / "a.safetensors", {up: UP, down: DOWN, up.replace("lora_up.weight", "alpha"): alpha})
    close(merged(flux, (path, 0.5)), {f"{QKV}.weight": 0.5 * float(alpha) / RANK * UP @ DOWN})


def test_differences_and_biases(tmp_path: Path, flux) -> None:
    diff, bias, norm, wide = tensor(C, C), tensor(C), tensor(128), tensor(4 * C, seed=5)
    path = write(tmp_path / "a.safetensors", {
        "diffusion_model.double_blocks.0.img_attn.proj.diff": diff,
        "diffusion_model.double_blocks.0.img_attn.proj.diff_b": bias,
        "diffusion_model.double_blocks.0.img_attn.norm.key_norm.diff": norm,
        "diffusion_model.single_blocks.0.norm.query_norm.w_norm": norm,
        "transformer.single_transformer_blocks.0.proj_mlp.lora_A.weight": DOWN,
        "transformer.single_transformer_blocks.0.proj_mlp.lora_B.weight": tensor(4 * C, RANK),
        "transformer.single_transformer_blocks.0.proj_mlp.lora_B.bias": wide,
    })  # fmt: skip
    linear1, linear1_bias = torch.zeros(7 * C, C), torch.zeros(7 * C)
    linear1[3 * C :], linear1_bias[3 * C :] = tensor(4 * C, RANK) @ DOWN, wide
    close(merged(flux, (path, 2.0)), {
        "double_blocks.0.img_attn.proj.weight": 2 * diff, "double_blocks.0.img_attn.proj.bias": 2 * bias,
        "double_blocks.0.img_attn.norm.key_norm.scale": 2 * norm, "single_blocks.0.norm.query_norm.scale": 2 * norm,
        "single_blocks.0.linear1.weight": 2 * linear1, "single_blocks.0.linear1.bias": 2 * linear1_bias,
    })  # fmt: skip


def test_relatives_of_lora(tmp_path: Path, flux) -> None:
    name = "lycoris_transformer_blocks_0_ff_net_2"
    a, b, c, d = tensor(C, RANK), tensor(RANK, 4 * C), tensor(C, RANK, seed=9), tensor(RANK, 4 * C, seed=9)
    path = write(tmp_path / "loha.safetensors", {
        f"{name}.hada_w1_a": a, f"{name}.hada_w1_b": b, f"{name}.hada_w2_a": c, f"{name}.hada_w2_b": d,
        f"{name}.alpha": torch.tensor(2.0)})  # fmt: skip
    close(merged(flux, (path, 1.0)), {"double_blocks.0.img_mlp.2.weight": 0.5 * (a @ b) * (c @ d)})
    w1, w2 = tensor(16, 8), tensor(C // 16, C // 2)
    path = write(tmp_path / "lokr.safetensors", {f"{name}.lokr_w1": w1, f"{name}.lokr_w2": w2,
                                                 f"{name}.alpha": torch.tensor(7.0)})  # fmt: skip
    close(merged(flux, (path, 1.0)), {"double_blocks.0.img_mlp.2.weight": torch.kron(w1, w2)})
    w2_a, w2_b = tensor(C // 16, RANK), tensor(RANK, C // 2)
    path = write(
        tmp_path / "lokr2.safetensors",
        {
            f"{name}.lokr_w1": w1,
            f"{name}.lokr_w2_a": w2_a,
            f"{name}.lokr_w2_b": w2_b,
            f"{name}.alpha": torch.tensor(2.0),
        },
    )
    close(merged(flux, (path, 1.0)), {"double_blocks.0.img_mlp.2.weight": 0.5 * torch.kron(w1, w2_a @ w2_b)})


def test_several_are_added_and_none_is_lost(tmp_path: Path, flux) -> None:
    up, down = SPELLINGS["comfyui"]
    one = write(tmp_path / "a.safetensors", {up: UP, down: DOWN, "text_encoder.x.lora_A.weight": tensor(2, 2)})
    two = write(tmp_path / "b.safetensors", {up: UP.bfloat16(), down: DOWN.half(), "lora_te1_x.alpha": tensor(1)})
    wanted = 0.7 * UP @ DOWN + 0.2 * UP.bfloat16().float() @ DOWN.half().float()
    close(merged(flux, (one, 0.7), (two, 0.2)), {f"{QKV}.weight": wanted})
    assert merged(flux, (one, 0.7), (one, 0.0)).keys() == {f"{QKV}.weight"}
    assert read_lora(one, FLUX).ignored == 1


def test_chunks_do_not_show(tmp_path: Path, flux) -> None:
    tensors = spelled("diffusers", "single_transformer_blocks.1.attn.to_v", tensor(C, RANK), DOWN)
    path = write(tmp_path / "a.safetensors", tensors)
    whole = merged(flux, (path, 1.0), chunk=1 << 30)
    for chunk in (997, C, 3 * C * C):
        close(merged(flux, (path, 1.0), chunk=chunk), whole)


@pytest.mark.parametrize("precision", ["split", "f32"])
def test_a_training_begins_with_the_exact_sum(tiny, tmp_path: Path, precision: str) -> None:
    """Under ``split`` too, where bf16 alone would lose most of a small change."""
    from trainer.loop import Trainer

    config, folder, dataset = tiny(dtype=torch.bfloat16, optimizer={"weight_precision": precision})
    name = "single_blocks.0.linear2"
    up, down = tensor(128, RANK), tensor(RANK, 5 * 128)
    path = write(tmp_path / "a.safetensors", {f"{name}.lora_B.weight": up, f"{name}.lora_A.weight": down})
    model = dataclasses.replace(config.model, loras=(LoraConfig(path=str(path), strength=0.001),))

    def weights(config: RunConfig) -> dict[str, Tensor]:
        entries = Trainer(config, folder, dataset=dataset).entries("f32")
        return {e.name: torch.cat([c.flatten() for c in e.chunks()]) for e in entries}

    plain, with_lora = weights(config), weights(dataclasses.replace(config, model=model))
    for key, value in with_lora.items():
        if key == f"{name}.weight":
            assert torch.equal(value, plain[key] + 0.001 * (up @ down).flatten())
            assert not torch.equal(value, plain[key])
        else:
            assert torch.equal(value, plain[key])


def test_what_is_exported_as_a_lora_can_be_merged_again(tiny, tmp_path: Path) -> None:
    """Full rank, with whole matrices, biases and norms under the names that every ComfyUI reads."""
    from trainer.export.write import ExportOptions, export
    from trainer.loop import Trainer
    from trainer.run import RunDirectory

    config, folder, dataset = tiny(optimizer={"lr": 3e-3, "weight_precision": "split"})
    run = RunDirectory.create(folder, config, dataset)
    trainer = Trainer(config, folder, dataset=dataset)
    trainer.train_step()
    path = tmp_path / "lora.safetensors"
    export(run, path, ExportOptions(lora_rank=128, dtype="f32"), trainer=trainer)
    info = require_flux(config.model.flux)
    lora = [LoraConfig(path=str(path))]
    with open_source(config.model.flux, info, lora) as source, open_source(config.model.flux, info) as parent:
        for each in trainer.entries("f32"):
            trained = torch.cat([c.flatten() for c in each.chunks()])
            assert not torch.equal(trained, parent.read(each.name)), each.name
            assert torch.allclose(source.read(each.name), trained, atol=1e-6), each.name


WRONG = {
    "no layer": ({"lora_unet_down_blocks_0.lora_up.weight": UP}, "key lora_unet_down_blocks_0.lora_up.weight"),
    "a block too many": ({"diffusion_model.double_blocks.2.img_attn.qkv.lora_B.weight": UP}, "double_blocks.2"),
    "strange end": ({f"{QKV}.strange": UP}, f"its key {QKV}.strange belongs to no layer"),
    "half": ({f"{QKV}.lora_B.weight": UP}, f"tensors beside {QKV}.lora_B.weight are missing"),
    "ranks": ({f"{QKV}.lora_B.weight": UP, f"{QKV}.lora_A.weight": tensor(RANK + 1, C)}, "do not fit each other"),
    "width": ({f"{QKV}.lora_B.weight": UP, f"{QKV}.lora_A.weight": tensor(RANK, C + 1)}, "changes [768, 257] where"),
    "rows": ({f"{QKV}.lora_B.weight": UP[1:], f"{QKV}.lora_A.weight": DOWN}, "where this Flux has [768, 256]"),
    "only texts": ({"lora_te1_a.lora_up.weight": UP}, "changes nothing in a Flux (it holds 1 tensors"),
    "dora": ({f"{QKV}.dora_scale": UP}, "is a DoRA which cannot be merged"),
    "peft dora": ({f"{QKV}.lora_magnitude_vector": UP}, "is a DoRA which cannot"),
    "oft": ({f"{QKV}.oft_blocks": UP}, "is an OFT which cannot"),
    "control": ({"img_in.lora_A.weight": UP, "single_blocks.0.norm.key_norm.scale": UP}, "such as those of Canny"),
    "integers": ({f"{QKV}.lora_B.weight": UP.int(), f"{QKV}.lora_A.weight": DOWN}, "is I32, which is not read"),
    "bias of a norm": ({f"{QKV.replace('qkv', 'norm.key_norm')}.diff_b": tensor(128)}, "belongs to no layer"),
    "a number": ({f"{QKV}.diff": torch.tensor(1.0)}, "changes [] where this Flux has [768, 256]"),
    "alpha alone": ({f"{QKV}.alpha": torch.tensor(1.0)}, "changes nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(tmp_path: Path, flux, case: str) -> None:
    tensors, words = WRONG[case]
    path = write(tmp_path / "my lora.safetensors", tensors)
    with pytest.raises(ValueError) as caught:
        open_source(flux[0], require_flux(flux[0]), [LoraConfig(path=str(path))])
    assert words in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_lora(tmp_path: Path, flux) -> None:
    torch.save({}, tmp_path / "a.pt")
    for path, words in ((tmp_path / "a.pt", "is a pickled"), (tmp_path / "none", "No such file"), (flux[0], "no layer"),
                        (tmp_path, "Is a directory")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            read_lora(path, FLUX)


def test_numbers_that_are_not_finite_are_not_merged(tmp_path: Path, flux) -> None:
    up, down = SPELLINGS["comfyui"]
    broken = UP.clone()
    broken[700, 1] = torch.nan
    path = write(tmp_path / "a.safetensors", {up: broken, down: DOWN})
    with pytest.raises(ValueError, match="not finite"):
        merged(flux, (path, 1.0))


KEYS = st.sampled_from([f"{QKV}.lora_A.weight", f"{QKV}.lora_B.weight", f"{QKV}.alpha", f"{QKV}.diff", f"{QKV}.diff_b",
                        f"{QKV}.lokr_w1", f"{QKV}.lokr_w2_a", f"{QKV}.lokr_w2_b", f"{QKV}.hada_w1_a",
                        f"{QKV}.hada_w2_b", "transformer.norm_out.linear.lora_A.weight",
                        "\n.alpha", ".alpha"])  # fmt: skip
SHAPES = st.lists(st.sampled_from([0, 1, 4, 256, 768]), max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS | st.text(max_size=5).filter(str.isascii), SHAPES, min_size=1, max_size=5))
def test_no_lora_raises_anything_else(tmp_path: Path, flux, shapes: dict[str, list[int]]) -> None:
    if any(torch.Size(shape).numel() > 10**6 for shape in shapes.values()):
        return
    path = write(tmp_path / "a.safetensors", {k: torch.zeros(v) for k, v in shapes.items() if k != "__metadata__"})
    try:
        with open_source(flux[0], require_flux(flux[0]), [LoraConfig(path=str(path))]) as source:
            for name in (f"{QKV}.weight", f"{QKV}.bias", "final_layer.adaLN_modulation.1.weight"):
                assert source.read(name).isfinite().all()
    except ValueError as error:
        assert "\n" not in str(error)

"""Which files are taken for a Flux, and what is said of each other kind. Headers are made here at their real sizes."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from headers import DEV, SCHNELL, TEXT_AND_VAE, check_refusal, diffusers, fake, flux
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainer.cli.main import main
from trainer.flux.model import TINY, FluxParams, build_meta, flux_params, init_weights_
from trainer.flux.sizes import shapes_of
from trainer.flux.variants import fingerprint, inspect_file, require_flux, text_length
from trainer.weights import entry, load_weights_, write_safetensors

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sizes", [DEV, SCHNELL, dataclasses.asdict(TINY)], ids=["dev", "schnell", "tiny"])
def test_shapes_are_the_model_s(sizes: dict) -> None:
    model = build_meta(FluxParams(**sizes))
    assert list(shapes_of(sizes).items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_flux_is_recognised(tmp_path: Path, prefix: str, dtype: str) -> None:
    info = require_flux(fake(tmp_path / "flux1-dev.safetensors", flux(DEV, dtype, prefix)))
    assert (info.kind, info.variant, info.trainable, info.reason) == ("flux", "dev", True, "")
    assert info.dtype == {"BF16": "bf16", "F16": "f16", "F32": "f32"}[dtype]
    assert info.params == 11_901_408_320 and info.prefix == prefix and not info.all_in_one
    assert flux_params(info) == FluxParams() and text_length(info) == 512


@pytest.mark.parametrize("prefix", ["", "transformer.", "model.diffusion_model."])
def test_a_flux_under_diffusers_names_is_recognised(tmp_path: Path, prefix: str) -> None:
    info = require_flux(fake(tmp_path / "flux1-dev.safetensors", diffusers(DEV, "BF16", prefix)))
    assert (info.kind, info.variant, info.dtype, info.diffusers) == ("flux", "dev", "bf16", True)
    assert info.params == 11_901_408_320 and info.prefix == prefix and flux_params(info) == FluxParams()
    assert not require_flux(fake(tmp_path / "b.safetensors", diffusers(SCHNELL))).flux["guidance_embed"]  # type: ignore[index]


@pytest.mark.parametrize("name, metadata, variant, note", [
    ("flux1-krea-dev.safetensors", {}, "dev", "FLUX.1 Krea dev, by its file name"),
    ("a.safetensors", {"modelspec.title": "Flux Krea"}, "dev", "FLUX.1 Krea dev, by its metadata"),
    ("a.safetensors", {"modelspec.architecture": "flux-1-dev"}, "dev", ""),
    ("my_merge.sft", {}, "dev", ""),
])  # fmt: skip
def test_what_hints_say_of_a_dev(tmp_path: Path, name: str, metadata: dict, variant: str, note: str) -> None:
    info = require_flux(fake(tmp_path / name, flux(), metadata))
    assert (info.variant, info.note) == (variant, note)


@pytest.mark.parametrize("name, metadata, variant, note", [
    ("flux1-schnell.safetensors", {}, "schnell", ""),
    ("consolidated_s6700-de-distilled.safetensors", {}, "de-distilled", "by its file name"),
    ("a.safetensors", {"modelspec.architecture": "flux-1-dev"}, "de-distilled", "by its metadata"),
    ("schnell.safetensors", {"modelspec.architecture": "flux-1-schnell"}, "schnell", ""),
    ("like-flux1-dev.safetensors", {"modelspec.architecture": "flux-1-schnell"}, "schnell", ""),
])  # fmt: skip
def test_what_hints_say_of_a_flux_without_guidance(
    tmp_path: Path, name: str, metadata: dict, variant: str, note: str
) -> None:
    info = require_flux(fake(tmp_path / name, flux(SCHNELL), metadata))
    assert info.variant == variant and note in info.note and bool(note) == bool(info.note)
    assert text_length(info) == (256 if variant == "schnell" else 512)


@pytest.mark.parametrize("steps, read", [("1200", 1200), ("", 0), ("-3", 0), ("1e3", 0), ("9" * 5000, 0)])
def test_an_export_says_how_far_it_was_trained(tmp_path: Path, steps: str, read: int) -> None:
    assert require_flux(fake(tmp_path / "a.safetensors", flux(), {"flux_fft.steps": steps})).parent_steps == read


def test_schnell_has_no_guidance_and_shorter_captions(tmp_path: Path) -> None:
    info = require_flux(fake(tmp_path / "a.safetensors", flux(SCHNELL)))
    assert info.variant == "schnell" and text_length(info) == 256
    assert flux_params(info) == FluxParams(guidance_embed=False)


def test_an_all_in_one_checkpoint_with_an_fp8_text_encoder(tmp_path: Path) -> None:
    tensors = flux(DEV, "BF16", "model.diffusion_model.") | TEXT_AND_VAE
    info = require_flux(fake(tmp_path / "a.safetensors", tensors))
    assert info.all_in_one and info.dtype == "bf16" and info.params == 11_901_408_320


def test_a_pruned_flux_gives_its_own_depths(tmp_path: Path) -> None:
    info = require_flux(fake(tmp_path / "flux-lite-8b.safetensors", flux(DEV | {"depth": 8})))
    assert flux_params(info).depth == 8 and flux_params(info).depth_single_blocks == 38


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("suffix", ["scale", "weight"])
def test_the_weights_of_each_layout_are_found(tmp_path: Path, prefix: str, suffix: str, base: torch.dtype) -> None:
    model = init_weights_(build_meta(TINY, base).to_empty(device="cpu"), 7)
    names = {n: prefix + (n[:-5] + suffix if n.endswith("_norm.scale") else n) for n, _ in model.named_parameters()}
    extra = [entry("vae.decoder.conv_in.weight", torch.zeros(8)), entry("text_encoders.x", torch.zeros(3))]
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry(names[n], p) for n, p in model.named_parameters()] + extra)
    info = require_flux(path)
    assert {n: info.tensor_name(n) for n in names} == names and info.all_in_one
    again = build_meta(flux_params(info), base).to_empty(device="cpu")
    load_weights_(again, path, {n: info.tensor_name(n) for n in names})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_run_called_kontext_can_be_trained_on(tmp_path: Path) -> None:
    assert inspect_file(fake(tmp_path / "kontext.safetensors", flux(), {"flux_fft.steps": "7"})).parent_steps == 7


def test_other_files_tell_their_size(tmp_path: Path) -> None:
    info = inspect_file(fake(tmp_path / "a.safetensors", flux(DEV, "F8_E4M3")))
    assert (info.dtype, info.params, info.trainable) == ("f8_e4m3", 11_901_408_320, False)


def test_a_few_leftover_numbers_do_no_harm(tmp_path: Path) -> None:
    assert require_flux(fake(tmp_path / "a.safetensors", flux() | {"step": ("F32", (1,))})).params == 11_901_408_320


def test_a_download_that_was_cut_short(tmp_path: Path) -> None:
    path = fake(tmp_path / "a.safetensors", flux(), cut=10**9)
    check_refusal(path, "truncated", "is cut short: 22,8")
    assert "still being downloaded, wait" in inspect_file(path).reason
    os.utime(path, (1e9, 1e9))
    assert "still being downloaded" not in inspect_file(path).reason
    path.write_bytes(path.open("rb").read(1000))
    check_refusal(path, "truncated", "is cut short within its header")


def test_folders_missing_and_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refusal(tmp_path, "folder", "is a folder")
    check_refusal(tmp_path / "none.safetensors", "missing", "does not exist")
    check_refusal(tmp_path / "none.safetensors" / "x", "missing", "does not exist")
    assert inspect_file("a\0b").kind == "unreadable"
    path = fake(tmp_path / "a.safetensors", flux())

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    check_refusal(path, "unreadable", "Permission denied")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda b: struct.pack("<Q", len(b)) + b))
def test_no_bytes_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    info = inspect_file(tmp_path / "a.safetensors")
    assert not info.trainable and info.reason and "\n" not in info.reason


SIZES = dataclasses.asdict(TINY)
SOME = st.sampled_from([*list(shapes_of(SIZES))[:40], "__metadata__"])
VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=3) | st.floats(), lambda v: st.lists(v, max_size=3))
TENSOR = st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES | st.just([0, 0]) | st.just("F32"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(SOME, VALUES | TENSOR, min_size=1), st.booleans())
@example({"__metadata__": 1}, True)
def test_no_header_raises(tmp_path: Path, changes: dict, whole: bool) -> None:
    """Random headers, and the header of a good file with some entries replaced."""
    path = fake(tmp_path / "a.safetensors", flux(SIZES))
    if whole:
        with open(path, "rb") as file:
            changes = json.loads(file.read(struct.unpack("<Q", file.read(8))[0])) | changes
    head = json.dumps(changes).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head)
    info = inspect_file(path)
    assert not info.trainable and info.reason and "\n" not in info.reason


@pytest.mark.parametrize("header", [
    f'{{"a":{{"dtype":"F32","shape":{json.dumps([10**4000] * 100)},"data_offsets":[0,4]}}}}',
    f'{{"a":{{"dtype":"F32","shape":{json.dumps([9] * 100_000)},"data_offsets":[0,4]}}}}',
    '{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}',
    f'{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,{"9" * 4000}]}}}}',
    '{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    '{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
    '{"a":' + "[" * 200_000,
    '{"a":' + "9" * 100_000 + "}",
    '{"__metadata__":[],"a":[]}',
    "{" + ",".join(f'"{i}":{{"dtype":"F32","shape":[],"data_offsets":[0,0]}}' for i in range(100_001)) + "}",
], ids=lambda text: text[:20] + text[-8:])  # fmt: skip
def test_headers_made_to_break_readers(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"1234")
    check_refusal(tmp_path / "a.safetensors", "other", "is not a safetensors file: its header cannot be read")


def test_strange_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (".", "", "/", "x" * 250, "x" * 300, "a/" * 3000, "~", "con", "a" + chr(0), chr(0xDC80)):
        info = inspect_file(path)
        assert not info.trainable and info.reason and "\n" not in info.reason, path
    assert inspect_file(".").kind == inspect_file(tmp_path).kind == "folder"
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        check_refusal(tmp_path / "pipe.safetensors", "unreadable", "is a pipe or a device")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert inspect_file(tmp_path / "loop").kind == "unreadable"
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "blob")  # as the cache of Hugging Face has them
    check_refusal(tmp_path / "gone.safetensors", "missing", "is a link to a file that is gone")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are the system's own there")
def test_files_and_folders_that_may_not_be_read() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder = Path(place) / "FLUX.1-dev"
        (folder / "transformer").mkdir(parents=True)
        (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
        file = fake(Path(place) / "flux.safetensors", flux())
        os.chmod(folder / "transformer", 0)
        os.chmod(file, 0)
        root = os.geteuid() == 0
        if root:  # who may read all
            os.seteuid(65534)
        try:
            for path in (file, folder, folder / "transformer"):
                check_refusal(path, "unreadable", "cannot be read (Permission denied): check the path and its permiss")
        finally:
            if root:
                os.seteuid(0)
            os.chmod(folder / "transformer", 0o755)


def test_the_help_of_inspect_tells_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "Exit code 0: it was named" in told and "2: there is nothing at that path" in told


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30), st.binary(max_size=20))
def test_no_name_raises(tmp_path: Path, name: str, content: bytes) -> None:
    """Of a file in the header, and of the file itself."""
    head = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"1")
    for path in (tmp_path / "a.safetensors", tmp_path / name, f"{tmp_path}/{name}"):
        reason = inspect_file(path).reason
        assert reason and "\n" not in reason and len(reason.splitlines()) == 1


def test_fingerprints(tmp_path: Path) -> None:
    model = init_weights_(build_meta(TINY, torch.float32).to_empty(device="cpu"), 0)
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry(n, p) for n, p in model.named_parameters()])
    first = fingerprint(path)
    assert len(first) == 64 and fingerprint(path) == first
    (tmp_path / "b.bin").write_bytes(path.read_bytes())
    assert fingerprint(tmp_path / "b.bin") == first, "the name does not count"
    content = bytearray(path.read_bytes())
    assert len(content) < 256 * 16 * 1024
    for place in (9, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert fingerprint(path) != first
    path.write_bytes(content)
    sampled = fingerprint(path, samples=16, sample_bytes=1024)
    for place in (9, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert fingerprint(path, samples=16, sample_bytes=1024) != sampled
    init_weights_(model, 1)
    write_safetensors(path, [entry(n, p) for n, p in model.named_parameters()])
    assert fingerprint(path, samples=16, sample_bytes=1024) != sampled
    for size in (0, 3, 8):
        (tmp_path / "c").write_bytes(b"\xff" * size)
        assert len(fingerprint(tmp_path / "c")) == 64


def test_a_fingerprint_of_24_gb_takes_no_time(tmp_path: Path) -> None:
    """It reads its samples and no more: counted, not timed."""
    path = fake(tmp_path / "a.safetensors", flux())
    code = (
        "import builtins, sys\nsys.path.insert(0, sys.argv[2])\nread, real = [], open\n"
        "class Counted:\n"
        "    def __init__(self, file): self.file = file\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *a): self.file.close()\n"
        "    def __getattr__(self, name): return getattr(self.file, name)\n"
        "    def read(self, *a):\n        out = self.file.read(*a); read.append(len(out)); return out\n"
        "from trainer.flux.variants import fingerprint\n"
        "builtins.open = lambda *a, **k: Counted(real(*a, **k))\n"
        "fingerprint(sys.argv[1]); print(sum(read), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, torch_loaded = done.stdout.split()
    assert 4 * 2**20 < int(count) < 5 * 2**20
    assert torch_loaded == "False"

"""Checkpoints streamed to disk and back; what remains after each way of failing."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.flux.model import TINY, Flux, build_meta, init_weights_
from trainer.weights import (
    DTYPES,
    DiskFull,
    Entry,
    NotSafetensors,
    TensorFile,
    Truncated,
    WriteFailed,
    dtype_name,
    entry,
    load_weights_,
    read_header,
    write_safetensors,
)

ROOT = Path(__file__).parents[2]


def model_entries(model: torch.nn.Module, dtype: str | None = None) -> list[Entry]:
    return [entry(name, p, dtype) for name, p in model.named_parameters()]


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_a_flux_comes_back_bit_for_bit(tmp_path: Path, base: torch.dtype) -> None:
    model = init_weights_(build_meta(TINY, base).to_empty(device="cpu"), 3)
    path = tmp_path / "flux.safetensors"
    write_safetensors(path, model_entries(model), {"title": "caf\u00e9"}, chunk_bytes=1000)
    again = build_meta(TINY, base).to_empty(device="cpu")
    load_weights_(again, path)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert read_header(path).metadata == {"title": "caf\u00e9"}
    assert left(tmp_path) == ["flux.safetensors"]


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    model = init_weights_(build_meta(TINY, torch.bfloat16).to_empty(device="cpu"), 0)
    write_safetensors(tmp_path / "a.safetensors", model_entries(model))
    theirs = safetensors.torch.load_file(tmp_path / "a.safetensors")
    ours = dict(model.named_parameters())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) and theirs[name].dtype == ours[name].dtype for name in ours)


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(24).reshape(2, 3, 4).to(dtype) for name, dtype in DTYPES.items() if not name.startswith("F8")
    }
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3.5)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"k": "v"})
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert file.header.metadata == {"k": "v"}
        for name, tensor in tensors.items():
            assert torch.equal(file.load(name), tensor) and file.load(name).dtype == tensor.dtype, name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(["F32", "BF16", "F16", "I16", "U8"]), st.lists(st.integers(0, 5), max_size=3)),
             max_size=6),
    st.integers(1, 64), st.integers(1, 40),
)  # fmt: skip
def test_any_chunks_give_the_same_file(tmp_path: Path, tensors: list, piece: int, chunk_bytes: int) -> None:
    values = []
    for dtype, shape in tensors:
        values.append(torch.randint(0, 100, shape).to(DTYPES[dtype]))
    pieces = [
        Entry(str(i), dtype_name(v.dtype), tuple(v.shape), lambda v=v: iter(v.flatten().split(piece)))
        for i, v in enumerate(values)
    ]
    write_safetensors(tmp_path / "a.safetensors", pieces, chunk_bytes=chunk_bytes)
    write_safetensors(tmp_path / "b.safetensors", [entry(str(i), v) for i, v in enumerate(values)])
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(loaded[str(i)], v) for i, v in enumerate(values))
    with TensorFile(tmp_path / "a.safetensors") as file:
        for i, v in enumerate(values):
            info = file.tensors[str(i)]
            assert info.start % v.dtype.itemsize == 0
            parts = [file.read(str(i), s, min(s + piece, v.numel())) for s in range(0, v.numel(), piece)]
            assert torch.equal(torch.cat([torch.empty(0, dtype=v.dtype), *parts]), v.flatten())


def test_conversion_rounds_to_nearest_and_only_once(tmp_path: Path) -> None:
    value = torch.randn(1000)
    for name in ("BF16", "F16", "F32"):
        write_safetensors(tmp_path / "a.safetensors", [entry("w", value, name)], chunk_bytes=64)
        with TensorFile(tmp_path / "a.safetensors") as file:
            assert torch.equal(file.load("w"), value.to(DTYPES[name]))
            assert torch.equal(file.load("w", torch.float64), value.to(DTYPES[name]).double())
            out = torch.zeros(300)
            file.read_into_("w", out, start=250, chunk_bytes=100)
            assert torch.equal(out, value[250:550].to(DTYPES[name]).float())


def test_a_number_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="big has values too large for float16: choose bf16 or f32"):
        write_safetensors(tmp_path / "a.safetensors", [entry("big", torch.tensor([1.0, 7e4]), "F16")])
    assert left(tmp_path) == []


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen = []
    tensors = [entry("a", torch.zeros(1000)), entry("b", torch.zeros(10), "BF16")]
    write_safetensors(tmp_path / "a.safetensors", tensors, chunk_bytes=800, progress=lambda *a: seen.append(a))
    assert seen == [(800, 4020), (1600, 4020), (2400, 4020), (3200, 4020), (4000, 4020), (4020, 4020)]


class Interrupted(BaseException):
    """As KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("error", [RuntimeError("device lost"), Interrupted()])
def test_a_failing_write_leaves_the_old_file_whole(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry("w", torch.ones(4))])
    before = path.read_bytes()

    def chunks():
        yield torch.zeros(2)
        assert (tmp_path / "a.safetensors.part").exists()
        raise error

    with pytest.raises(type(error)):
        write_safetensors(path, [Entry("w", "F32", (4,), chunks)], chunk_bytes=4)
    assert path.read_bytes() == before
    assert left(tmp_path) == ["a.safetensors"]


def test_too_few_elements_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="3 elements"):
        write_safetensors(tmp_path / "a.safetensors", [Entry("w", "F32", (4,), lambda: [torch.zeros(3)])])
    assert left(tmp_path) == []


def test_a_full_disk_is_met_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - 1000, 1000))
    never = Entry("w", "F32", (10**9,), lambda: pytest.fail("asked for data"))
    with pytest.raises(DiskFull, match=r"no room for .*a\.safetensors: 4\.00 GB are needed and 0\.0 MB are free"):
        write_safetensors(tmp_path / "a.safetensors", [never])
    assert left(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
@pytest.mark.parametrize("way", ["limit", "full"])
def test_a_disk_that_fills_up_while_writing(tmp_path: Path, way: str) -> None:
    """A real error of the system: the process's file size limit (EFBIG), or a device without room (ENOSPC)."""
    if way == "full" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry("w", torch.ones(4))])
    before = path.read_bytes()
    if way == "full":
        (tmp_path / "a.safetensors.part").symlink_to("/dev/full")
    code = f"""
import resource, sys, torch
from trainer.weights import DiskFull, entry, write_safetensors
if {way == "limit"}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_safetensors(sys.argv[1], [entry("w", torch.zeros(1_000_000))], chunk_bytes=1000)
except DiskFull as error:
    sys.exit(f"{{error}}")
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"no room for {path}: 4.0 MB are needed")
    assert path.read_bytes() == before
    assert left(tmp_path) == ["a.safetensors"]


def test_a_missing_folder_and_a_folder_in_the_way(tmp_path: Path) -> None:
    with pytest.raises(WriteFailed, match="does not exist; create it"):
        write_safetensors(tmp_path / "no" / "a.safetensors", [])
    with pytest.raises(WriteFailed, match="a folder has that name"):
        write_safetensors(tmp_path, [])


def test_a_file_in_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(WriteFailed, match="Permission denied; choose another folder"):
        write_safetensors(tmp_path / "a.safetensors", [entry("w", torch.ones(4))])
    assert left(tmp_path) == []


def raw_file(path: Path, table: object, data: bytes = b"") -> Path:
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


@pytest.mark.parametrize(
    "table", [
        [], {"w": 3}, {"w": {"dtype": "F32"}}, {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, {"w": {"dtype": "F32", "shape": 1}},
    ],
)  # fmt: skip
def test_a_damaged_header_is_one_line(tmp_path: Path, table: object) -> None:
    with pytest.raises(NotSafetensors) as caught:
        read_header(raw_file(tmp_path / "a.safetensors", table, b"\0" * 4))
    assert "a.safetensors" in str(caught.value) and "\n" not in str(caught.value)


def test_a_cut_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry("w", torch.ones(100))])
    whole = path.read_bytes()
    for size, kind in ((len(whole) - 1, Truncated), (20, Truncated), (7, NotSafetensors), (0, NotSafetensors)):
        path.write_bytes(whole[:size])
        with pytest.raises(kind):
            read_header(path)


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    model = Flux(TINY)
    path = tmp_path / "a.safetensors"
    entries = model_entries(model)
    write_safetensors(path, entries[1:])
    with pytest.raises(ValueError, match=f"has no tensor {entries[0].name}"):
        load_weights_(model, path)
    write_safetensors(path, [entry(entries[0].name, torch.zeros(3)), *entries[1:]])
    with pytest.raises(ValueError, match=r"img_in.weight has the shape \[3\] where \[128, 64\] is needed"):
        load_weights_(model, path)

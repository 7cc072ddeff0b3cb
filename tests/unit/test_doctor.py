"""The doctor on a CPU: what it says, what it leaves for the plan, and that it sees what is wrong."""

import json

import pytest
import torch
from fake_streams import FakeStreams

from trainer.cli.main import main
from trainer.memory import checks, doctor, machine
from trainer.memory.streams import Streams


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(checks, "matmul_tflops", lambda device: 1.5)
    monkeypatch.setattr(checks, "memory_speed", lambda: 20.0)
    monkeypatch.setattr(checks, "disk_speed", lambda folder, real=checks.disk_speed: real(folder, 1 << 20))


def test_a_cpu_is_examined_in_seconds_and_what_is_found_feeds_the_plan(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUX_FFT_HOME", str(tmp_path / "home"))
    code = main(["doctor", "--device", "cpu", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["problems"] == [] and report["equal"] is True
    assert report["device"] == "cpu" and report["kernel_path"].startswith("eager")
    assert report["speeds"]["tflops"] > 0 and report["speeds"]["dram"] > 0
    assert report["disk"]["write"] > 0 and report["disk"]["read"] > 0 and report["disk"]["free"] > 0
    assert report["copies"] == {} and report["pinnable_gb"] is None
    assert machine.load_speeds() == machine.Speeds(**report["speeds"])
    assert not list((tmp_path / "home").glob(".doctor*"))


def test_it_ends_in_a_block_for_a_bug_report(capsys, tmp_path, quick):
    assert main(["doctor", "--device", "cpu", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out.rstrip()
    assert told.endswith("```") and told.count("```") == 2
    for what in ("torch", "ram", "streamed equals resident: yes", "update kernel", "disk", "no problems found"):
        assert what in told
    assert str(tmp_path) not in told  # no path of the user's


def test_streams_that_lose_an_order_are_seen():
    class Late(Streams):
        """Copies to the device that bring nothing."""

        staged = True

        def copy(self, stream, target, source):
            if stream != "up":
                target.copy_(source)

    assert checks.streamed_equals_resident("cpu", streams=FakeStreams, steps=2)
    assert not checks.streamed_equals_resident("cpu", streams=Late, steps=2)


def test_a_check_that_fails_is_a_problem_and_the_others_go_on(capsys, tmp_path, quick, monkeypatch):
    def broken(device):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(checks, "matmul_tflops", broken)
    assert main(["doctor", "--device", "cpu", "--folder", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == ["matrix products: RuntimeError: no kernel image is available"]
    assert report["equal"] and report["disk"]["write"] > 0


def test_a_device_that_is_not_there_is_a_users_error(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert main(["doctor", "--device", "cuda", "--folder", str(tmp_path)]) == 2
    assert "no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"speeds": {"h2d": "fast"}}'])
def test_speeds_that_cannot_be_read_say_what_to_do(tmp_path, text):
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(ValueError, match="run the doctor again"):
        machine.load_speeds(tmp_path / "machine.json")
    assert machine.load_speeds(tmp_path / "none.json") == machine.Speeds()


def test_the_text_for_a_gpu_names_every_speed():
    report = doctor.Report(
        device="cuda:0",
        system={"gpu": "Some GPU"},
        equal=False,
        kernel_path="compiled",
        speeds=machine.Speeds(tflops=150.0, h2d=50.0, d2h=51.0, dram=80.0),
        copies={"h2d": 56.0, "d2h": 57.0, "h2d_both": 50.0, "d2h_both": 51.0},
        pinnable_gb=100.0,
        disk={"write": 2.0, "read": 3.0, "free": 500.0},
        seconds=90.0,
        problems=("it differs",),
    )
    told = doctor.text(report)
    for what in ("150.00", "56.0 up, 57.0 down, 50.0 up and 51.0 down at once", "100 GiB", "NO", "it differs"):
        assert what in told

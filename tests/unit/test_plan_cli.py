"""``python -m trainer plan``."""

import dataclasses
import json

import pytest
from plans import planned

from trainer.cli import plan as plan_cli


def asked(capsys, *arguments: str) -> dict:
    """What ``python -m trainer plan`` answers."""
    from trainer.cli.main import main

    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


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


def test_text_for_people_names_what_matters():
    told = plan_cli.text(planned(24, 128))
    assert "fits on cuda:0" in told and "optimizer states" in told and "blocks wait" in told


def test_the_command_counts_an_average_in(capsys):
    wide = ["--preset", "flux-dev", "--vram", "32", "--ram", "160", "--state-format", "log16"]
    plain, kept = asked(capsys, *wide), asked(capsys, *wide, "--ema")
    assert kept["ram_gb"] - plain["ram_gb"] > 20 and "average of the weights" in kept["items"]

"""Wrong inputs of a graph through ``/prompt`` of a real server: each is one line that names the input."""

from __future__ import annotations

import math
import os
import shutil

import pytest

from tests.comfyui.graphs import delete, demo, four_nodes, train, with_defaults
from tests.comfyui.server import Graph, Rejected, Server


def test_a_file_name_that_is_no_utf8_ends_nothing_but_the_prompt(placed: Server) -> None:
    path = os.fsencode(placed.base / "models/diffusion_models") + b"/mod\xe9.safetensors"
    try:
        with open(path, "wb") as file:
            file.write(b"no model")
    except OSError:
        pytest.skip("this file system takes no such name")
    g = four_nodes("nothing", 1)
    g["1"]["inputs"]["flux"] = "mod\udce9.safetensors"
    result = placed.run(g)
    assert result.error_node == "1" and "mod\\udce9.safetensors" in result.error
    g = four_nodes("nothing", 1)
    g["2"]["inputs"]["folder"] = "\ud800"
    result = placed.run(g)
    assert "\\ud800" in result.error and "\n" not in result.error
    assert not placed.run(four_nodes("lives", 1)).error


class TestInputErrors:
    """One line that names the input; what was there before stays whole."""

    def test_an_empty_folder(self, placed: Server) -> None:
        (placed.base / "input/empty").mkdir(exist_ok=True)
        g = four_nodes("nothing", 1)
        g["2"]["inputs"]["folder"] = "empty"
        self.fails(placed, g, "3", "empty")
        assert not (placed.home / "nothing").exists()

    def test_a_folder_that_is_not_there(self, placed: Server) -> None:
        g = four_nodes("nothing", 1)
        g["2"]["inputs"]["folder"] = "/no/such/folder"
        self.fails(placed, g, "3", "/no/such/folder")

    def test_a_file_that_is_no_image(self, placed: Server) -> None:
        folder = placed.base / "input/broken"
        folder.mkdir(exist_ok=True)
        (folder / "text.png").write_text("this is text")
        g = four_nodes("nothing", 1)
        g["2"]["inputs"]["folder"] = "broken"
        self.fails(placed, g, "3", "text.png")

        shutil.copy(placed.base / "input/drawings/00_red_circle.png", folder / "good.png")
        g = four_nodes("one_good", 1)
        g["2"]["inputs"]["folder"] = "broken"
        result = placed.run(g)
        assert not result.error
        assert "text.png" in result.text("3")
        assert "Without a caption: 1 picture," in result.text("3")
        assert "1 picture, 1 size" in result.text("3").splitlines()

    def test_a_wrong_model_file(self, placed: Server) -> None:
        models = placed.base / "models"
        shutil.copy(models / "vae/demo_vae.safetensors", models / "diffusion_models/wrong.safetensors")
        g = four_nodes("nothing", 1)
        g["1"]["inputs"]["flux"] = "wrong.safetensors"
        self.fails(placed, g, "1", "wrong.safetensors")

    def test_a_model_file_that_is_gone(self, placed: Server) -> None:
        g = four_nodes("nothing", 1)
        g["1"]["inputs"]["flux"] = "gone.safetensors"
        self.fails(placed, g, "1", "gone.safetensors")

    @pytest.mark.parametrize("name", ["vae", "clip_l"])
    @pytest.mark.parametrize("junk", [True, False])
    def test_a_wrong_encoder_file(self, placed: Server, name: str, junk: bool) -> None:
        models = placed.base / "models"
        path = models / ("vae" if name == "vae" else "text_encoders") / f"wrong_{name}_{junk}.safetensors"
        shutil.copy(models / "diffusion_models/flux_demo.safetensors", path)
        if junk:
            path.write_bytes(b"junk")
        g = four_nodes("nothing", 1)
        g["1"]["inputs"] |= {"t5": path.name, name: path.name} if name == "clip_l" else {name: path.name}
        self.fails(placed, g, "1", f"{name} is")

    @pytest.mark.parametrize("rate", ["-1e-6", "nan", math.nan, "fast", "inf"])
    def test_a_learning_rate_that_is_none(self, server: Server, rate: object) -> None:
        g = Graph()
        parts = demo(g)
        optimizer = g.add("FluxFFTOptimizerAdan", learning_rate=rate, weight_decay=0.0, no_prox=False, beta1=0.98,
                          beta2=0.92, beta3=0.99, eps="1e-8", state_format="f32", weight_precision="f32")
        train(g, parts._replace(optimizer=optimizer.out(0)), "rate", 1)
        self.fails(server, g, optimizer, "learning", at="learning_rate")
        assert not (server.home / "rate").exists()

    @pytest.mark.parametrize("kind", ["NAdam", "Adan"])
    def test_an_eps_that_is_none_stands_once_at_its_node(self, server: Server, kind: str) -> None:
        g = Graph()
        optimizer = with_defaults(server, g, f"FluxFFTOptimizer{kind}", eps="tiny")
        train(g, demo(g)._replace(optimizer=optimizer.out(0)), "eps", 1)
        self.fails(server, g, optimizer, "eps is 'tiny'")
        assert not (server.home / "eps").exists()

    @pytest.mark.parametrize("name", ["a/b", "..", "a\\b", "", "con"])
    def test_a_run_name_that_is_none(self, server: Server, name: str) -> None:
        g = Graph()
        train(g, demo(g), name, 1)
        self.fails(server, g, "2", "run name", at="run_name")

    def test_another_dataset_under_the_same_name(self, placed: Server) -> None:
        placed.run(four_nodes("same", 1))
        g = four_nodes("same", 2)
        shutil.copytree(placed.base / "input/drawings", placed.base / "input/other", dirs_exist_ok=True)
        g["2"]["inputs"]["folder"] = "other"
        self.fails(placed, g, "3", "dataset.folder")
        assert placed.steps("same") == [1]

        g["3"]["inputs"]["if_different"] = "use the next free name"
        assert not placed.run(g).error
        assert placed.steps("same") == [1]
        assert placed.steps("same_2") == [1, 2]
        assert not placed.run(g).error, "the next free name is found again, not another one made"
        assert not (placed.home / "same_3").exists()

        delete(placed, "same_2")
        assert not placed.run(g).error, "one that was deleted is made anew"
        assert placed.steps("same_2") == [1, 2]

        g["3"]["inputs"]["if_different"] = "continue the run"
        assert not placed.run(g).error
        assert placed.steps("same") == [1, 2]

    def fails(self, server: Server, graph: Graph, node: str, word: str, at: str = "") -> None:
        """``at``: the one input at which the mistake stands, where it is told before anything runs."""
        try:
            result = server.run(graph)
        except Rejected as refusal:
            said = refusal.errors["node_errors"][node]["errors"]
            assert len(said) == 1 and at in ("", said[0]["extra_info"]["input_name"]), said
            line = " ".join(f"{e['message']} {e['details']}" for e in said)
        else:
            assert result.error_node == node, result
            line = result.error
        assert word in line, line
        assert "\n" not in line.strip(), line
        assert "Traceback" not in line

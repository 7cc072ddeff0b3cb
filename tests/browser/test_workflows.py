"""Every example workflow: opened in the real frontend, and its prompt held against what the server's nodes take."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.canvas import RENDERERS, Canvas
from tests.comfyui.server import PACK_NAME, Server

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "example_workflows").glob("*.json"))
FILE = (".safetensors", ".sft")


def faults(prompt: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """What the server would refuse in a prompt. Names of model files and runs are let pass: they are the user's."""
    found = []
    for key, node in prompt.items():
        kind = known.get(node["class_type"])
        if kind is None:
            found.append(f"{key}: no node {node['class_type']}")
            continue
        takes = {**kind["input"].get("required", {}), **kind["input"].get("optional", {})}
        where = f"{key} {node['class_type']}"
        needed = kind["input"].get("required", {})
        found += [f"{where}: {name} is missing" for name in needed if name not in node["inputs"]]
        for name, value in node["inputs"].items():
            if name not in takes:
                found.append(f"{where}: there is no input {name}")
            elif isinstance(value, list):
                found += [f"{where}.{name}: {what}" for what in _link_faults(takes[name], value, prompt, known)]
            elif name != "run_name" and not _fits(takes[name], value):
                found.append(f"{where}: {name} cannot be {value!r}, it takes {takes[name]}")
    return found


def _link_faults(spec: list[Any], link: list[Any], prompt: dict[str, Any], known: dict[str, Any]) -> list[str]:
    source = prompt.get(str(link[0]))
    if source is None:
        return [f"comes from {link[0]}, which is not there"]
    gives = known.get(source["class_type"], {}).get("output", [])
    if link[1] >= len(gives):
        return [f"{source['class_type']} has no output {link[1]}"]
    wanted = spec[0] if isinstance(spec[0], str) else "COMBO"
    return [] if wanted in ("*", gives[link[1]]) or gives[link[1]] == "*" else [f"is {gives[link[1]]}, wanted {wanted}"]


def _fits(spec: list[Any], value: Any) -> bool:
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    choices = kind if isinstance(kind, list) else options.get("options") if kind == "COMBO" else None
    if choices is not None:
        return value in choices or (isinstance(value, str) and value.endswith(FILE))
    if kind in ("INT", "FLOAT"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "FLOAT" or value == int(value)) and \
            options.get("min", value) <= value <= options.get("max", value)
    return isinstance(value, {"STRING": str, "BOOLEAN": bool}.get(kind, object))


def test_the_check_finds_faults() -> None:
    known = {"A": {"input": {"required": {"n": ["INT", {"min": 1, "max": 5}], "c": [["x", "y"], {}], "l": ["L", {}]}},
                   "output": []}, "B": {"input": {}, "output": ["L", "M"]}}
    inputs = {"n": 3, "c": "x", "l": ["2", 0]}
    good = {"1": {"class_type": "A", "inputs": inputs}, "2": {"class_type": "B", "inputs": {}}}
    assert faults(good, known) == []
    for change in ({"n": 9}, {"n": 2.5}, {"n": "3"}, {"c": "z"}, {"l": ["2", 1]}, {"l": ["3", 0]}, {"extra": 1}):
        assert len(faults({**good, "1": {"class_type": "A", "inputs": {**inputs, **change}}}, known)) == 1, change
    del inputs["l"]
    assert len(faults(good, known)) == 1
    assert faults({"1": {"class_type": "C", "inputs": {}}}, known) == ["1: no node C"]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 8


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_opens_whole(canvas: Callable[..., Canvas], server: Server, path: Path, renderer: str) -> None:
    if renderer == "vue" and not server.install.at_least(0, 20):
        pytest.skip("Nodes 2.0 is not finished in this frontend")
    page = canvas(renderer=renderer)
    workflow = json.loads(path.read_text(encoding="utf-8"))
    page.load(workflow)
    page.fit()
    page.screenshot(f"example-{path.stem}")
    nodes = page.nodes()
    assert len(nodes) == len(workflow["nodes"])
    assert [n["type"] for n in nodes if not n["known"]] == []
    assert faults(page.api_prompt(), server.get("/object_info")) == []
    overlapping = _overlaps(page)
    assert overlapping == [], "nodes lie on each other"


def test_the_demo_opens_from_the_template_browser(canvas: Callable[..., Canvas]) -> None:
    page = canvas()
    page.page.evaluate("() => { window.app.extensionManager.command.execute('Comfy.BrowseTemplates') }")
    page.page.get_by_text(PACK_NAME).last.click()
    card = page.page.locator("h3[title*='demo on any machine']")
    card.wait_for()
    page.page.wait_for_timeout(1000)  # its picture
    page.screenshot("templates")
    card.click()
    page.page.wait_for_function(
        "() => window.app.canvas.graph.nodes.filter((n) => n.type === 'FluxFFTTrainSteps').length > 0")
    page.page.wait_for_timeout(500)
    assert {n["type"] for n in page.nodes()} >= {"FluxFFTDemo", "FluxFFTStart", "FluxFFTTrainSteps"}


def _overlaps(page: Canvas) -> list[str]:
    return json.loads(page.page.evaluate("""() => {
      const boxes = window.app.canvas.graph.nodes.map((n) => ({
        title: n.title, left: n.pos[0], top: n.pos[1] - 30,
        right: n.pos[0] + n.size[0], bottom: n.pos[1] + n.size[1] }))
      const found = []
      for (const [i, a] of boxes.entries()) for (const b of boxes.slice(i + 1)) {
        const apart = a.left >= b.right || b.left >= a.right || a.top >= b.bottom || b.top >= a.bottom
        if (!apart) found.push(`${a.title} / ${b.title}`)
      }
      return JSON.stringify(found)
    }"""))


def test_every_node_has_a_help_page_and_says_what_its_inputs_do(server: Server) -> None:
    known = {name: kind for name, kind in server.get("/object_info").items() if name.startswith("FluxFFT")}
    assert len(known) >= 15
    docs = Path(__file__).resolve().parents[2] / "web" / "docs"
    for name, kind in known.items():
        page = (docs / f"{name}.md").read_text(encoding="utf-8")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/extensions/{PACK_NAME}/docs/{name}.md") as served:
            assert served.read().decode() == page
        inputs = [i for group in ("required", "optional") for i in kind["input"].get(group, {})]
        assert [i for i in inputs if f"`{i}`" not in page] == [], name
        assert page.startswith(f"# {kind['display_name']}\n"), name

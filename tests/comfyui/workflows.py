"""Workflow files of the canvas as the prompts that the canvas makes of them, and back."""

from __future__ import annotations

import uuid
from typing import Any

WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def is_widget(spec: list[Any]) -> bool:
    """Whether an input of ``/object_info`` is a widget rather than a socket."""
    return isinstance(spec[0], list) or spec[0] in WIDGETS


def inputs_of(info: dict[str, Any]) -> dict[str, list[Any]]:
    """All inputs of a node in the canvas's order: required, then optional."""
    return {**info["input"].get("required", {}), **info["input"].get("optional", {})}


def has_control(name: str, spec: list[Any]) -> bool:
    """Whether the canvas adds a widget "control after generate" behind this one."""
    return name in ("seed", "noise_seed") or bool(len(spec) > 1 and spec[1].get("control_after_generate"))


def to_prompt(workflow: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """The prompt in API format, as the canvas makes it from a workflow file."""
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] not in info:
            continue  # notes
        sockets = {slot["name"]: slot.get("link") for slot in node.get("inputs", [])}
        values, inputs = list(node.get("widgets_values", [])), {}
        for name, spec in inputs_of(info[node["type"]]).items():
            if is_widget(spec):
                inputs[name] = values.pop(0)
                if has_control(name, spec):
                    values.pop(0)
            if sockets.get(name) is not None:
                link = links[sockets[name]]
                inputs[name] = [str(link[1]), link[2]]
        assert not values, f"{node['type']} has {len(values)} widget values too many"
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def to_workflow(prompt: dict[str, Any], places: dict[str, tuple[int, int, int, int]], info: dict[str, Any],
                notes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A workflow file of a prompt. ``places``: x, y, width and height of each node, by id."""
    nodes, links = [], []
    outgoing: dict[tuple[str, int], list[int]] = {}
    for key, node in prompt.items():
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                kind = info[prompt[value[0]]["class_type"]]["output"][value[1]]
                slot = list(_sockets(info[node["class_type"]])).index(name)
                links.append([len(links) + 1, int(value[0]), value[1], int(key), slot, kind])
                outgoing.setdefault((value[0], value[1]), []).append(len(links))
    for order, (key, node) in enumerate(prompt.items()):
        about = info[node["class_type"]]
        specs, values = inputs_of(about), []
        for name, spec in specs.items():
            if is_widget(spec):
                values.append(node["inputs"][name])
                if has_control(name, spec):
                    values.append("fixed")
        slots = []
        for slot, (name, spec) in enumerate(_sockets(about).items()):
            link = next((entry[0] for entry in links if entry[3] == int(key) and entry[4] == slot), None)
            optional = {"shape": 7} if name in about["input"].get("optional", {}) else {}
            widget = {"widget": {"name": name}} if is_widget(spec) else {}
            slots.append({"name": name, "type": "COMBO" if isinstance(spec[0], list) else spec[0], **optional, **widget,
                          "link": link})
        x, y, width, height = places[key]
        nodes.append({
            "id": int(key), "type": node["class_type"], "pos": [x, y], "size": [width, height], "flags": {},
            "order": order, "mode": 0, "inputs": slots,
            "outputs": [{"name": name, "type": kind, "links": outgoing.get((key, i)) or None}
                        for i, (name, kind) in enumerate(zip(about["output_name"], about["output"], strict=True))],
            "properties": {"Node name for S&R": node["class_type"]}, "widgets_values": values,
        })  # fmt: skip
    nodes += notes or []
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, "flux-full-fine-tune/" + "-".join(n["type"] for n in nodes))),
        "revision": 0, "last_node_id": max(n["id"] for n in nodes), "last_link_id": len(links), "nodes": nodes,
        "links": links, "groups": [], "config": {}, "extra": {}, "version": 0.4,
    }  # fmt: skip


def _sockets(about: dict[str, Any]) -> dict[str, list[Any]]:
    """Inputs in the order of a saved file: sockets, then widgets."""
    specs = inputs_of(about)
    return {n: s for n, s in specs.items() if not is_widget(s)} | {n: s for n, s in specs.items() if is_widget(s)}

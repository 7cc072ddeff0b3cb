"""Writes ``en/nodeDefs.json`` from what a running ComfyUI says of our nodes: ``python locales/make.py URL``.

The texts themselves are those of the schemas in ``nodes/``; a translator copies the file and translates its values
(``tests/comfyui/test_locales.py`` names what a language lacks). Format: ComfyUI's frontend, ``nodeDefs``.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any


def definitions(info: dict[str, Any]) -> dict[str, Any]:
    """``nodeDefs`` of our nodes in ``/object_info``: names, descriptions and tooltips."""
    found = {}
    for name, node in sorted(info.items()):
        if not name.startswith("FluxFFT"):
            continue
        inputs = {}
        for kind in ("required", "optional"):
            for key, spec in node["input"].get(kind, {}).items():
                inputs[key] = {"name": key, "tooltip": spec[1]["tooltip"]}
        outputs = {str(place): {"name": text} for place, text in enumerate(node["output_name"])}
        for place, tip in enumerate(node.get("output_tooltips") or ()):
            if tip:
                outputs[str(place)]["tooltip"] = tip
        texts = {"display_name": node["display_name"], "description": node["description"]}
        found[name] = {**texts, "inputs": inputs, "outputs": outputs}
    return found


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url.rstrip('/')}/object_info") as answer:
        info = json.load(answer)
    text = json.dumps(definitions(info), indent=2, ensure_ascii=False) + "\n"
    (Path(__file__).parent / "en" / "nodeDefs.json").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1])

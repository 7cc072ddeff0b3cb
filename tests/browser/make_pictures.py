"""Remakes the pictures that users see: ``python -m tests.browser.make_pictures [help thumbnails runs demo]`` (or all).

``help``: each node as it is connected, for its help page (``web/docs/pictures``). ``thumbnails``: the example
workflows, for the template browser. ``runs``: the sidebar's tab with a run (``docs/images/runs.png``). ``demo``: the
demo's graph after it was trained (``docs/images/canvas.png``). All are taken in a real ComfyUI, found as the tests find
it, over a demo run that is trained first. Look at them before you commit them.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.browser.canvas import Canvas, launch
from tests.browser.runs import DEMO, demo, wait_idle, with_previews
from tests.comfyui.server import PACK, Graph, Server, find_installs

log = logging.getLogger(__name__)
RUN, STEPS = "my_demo", 400
LIMIT = 60_000
"""Bytes of a help picture: the pack is cloned by everyone."""
TRAIN, START, OPEN, PREVIEWS = "FluxFFTTrainSteps", "FluxFFTStart", "FluxFFTOpenRun", "FluxFFTPreviewSettings"
SCENES: dict[str, list[list[str]]] = {
    "FluxFFTModel": [["FluxFFTModel"], [START]],
    "FluxFFTMergeLoRA": [["FluxFFTModel"], ["FluxFFTMergeLoRA"], [START]],
    "FluxFFTDataset": [["FluxFFTPictureSettings"], ["FluxFFTDataset"], [START]],
    "FluxFFTPictureSettings": [["FluxFFTPictureSettings"], ["FluxFFTDataset"]],
    "FluxFFTCaptionSettings": [["FluxFFTCaptionSettings"], ["FluxFFTDataset"]],
    "FluxFFTOptimizerNAdam": [["FluxFFTOptimizerNAdam"], [START]],
    "FluxFFTOptimizerAdan": [["FluxFFTOptimizerAdan"], [START]],
    "FluxFFTMemory": [["FluxFFTMemory"], [START]],
    "FluxFFTRecipe": [["FluxFFTRecipe"], [START]],
    START: [["FluxFFTModel", "FluxFFTDataset"], [START], [TRAIN]],
    OPEN: [[OPEN], [TRAIN]],
    TRAIN: [[START, PREVIEWS], [TRAIN]],
    PREVIEWS: [[OPEN, PREVIEWS], [TRAIN]],
    "FluxFFTPreview": [[OPEN, PREVIEWS], ["FluxFFTPreview"]],
    "FluxFFTCompare": [[OPEN, PREVIEWS], ["FluxFFTCompare"]],
    "FluxFFTRunModel": [[OPEN], ["FluxFFTRunModel"], ["KSampler"]],
    "FluxFFTLossPlot": [[OPEN], ["FluxFFTLossPlot"]],
    "FluxFFTExport": [[OPEN], [TRAIN], ["FluxFFTExport"]],
    "FluxFFTDemo": [["FluxFFTDemo"], [START], [TRAIN]],
    "FluxFFTDoctor": [["FluxFFTDoctor"]],
}
"""The columns of nodes that each node is shown in, linked from left to right."""
QUEUED = ("FluxFFTPreview", "FluxFFTCompare", "FluxFFTLossPlot")
"""Nodes that are shown with what they made."""
SIZES = {"FluxFFTPreview": (480, 420), "FluxFFTCompare": (560, 560), "FluxFFTLossPlot": (480, 420),
         OPEN: (300, 150), PREVIEWS: (330, 420)}
VALUES: dict[str, dict[str, Any]] = {
    "FluxFFTModel": {"flux": "flux1-dev.safetensors", "clip_l": "clip_l.safetensors", "t5": "t5xxl_fp16.safetensors",
                     "vae": "ae.safetensors"},
    "FluxFFTMergeLoRA": {"lora": "my_style.safetensors", "strength": 0.8},
    "FluxFFTDataset": {"folder": "my_pictures"},
    START: {"run_name": RUN},
    OPEN: {"run_name": RUN},
    PREVIEWS: {"prompts": "a red circle\na blue star\na green square\na yellow triangle", "width": 64, "height": 64,
               "guidance": 1.0, "preview_seed": 1},
    TRAIN: {"steps": STEPS},
    "FluxFFTCompare": {"cell_side": 96, "steps": "200"},
}
_BUILD = """async ([columns, values, sizes]) => {
  const graph = window.app.canvas.graph
  graph.clear()
  window.scenes = (window.scenes ?? 0) + 1  // the frontend keeps values and pictures by the nodes' ids
  graph.last_node_id = 100 * window.scenes
  const made = columns.map((types) => types.map((type) => {
    const node = window.LiteGraph.createNode(type)
    graph.add(node)
    for (const [name, value] of Object.entries(values[type] ?? {})) {
      const widget = node.widgets.find((w) => w.name === name)
      widget.value = value
      widget.callback?.(value)
    }
    return node
  }))
  for (const [i, column] of made.entries()) for (const from of column) for (const to of made[i + 1] ?? []) {
    for (const [slot, output] of from.outputs.entries()) {
      const place = to.inputs.findIndex((input) => input.type === output.type && input.link == null)
      if (place >= 0) from.connect(slot, to, place)
    }
  }
  await new Promise((done) => setTimeout(done, 800))
  let x = 0
  for (const column of made) {
    const width = Math.max(...column.map((n) => sizes[n.type]?.[0] ?? Math.max(300, n.computeSize()[0])))
    let y = 0
    for (const node of column) {
      const least = node.computeSize()
      node.setSize([width, Math.max(sizes[node.type]?.[1] ?? 0, least[1])])
      node.pos = [x, y]
      y += node.size[1] + 70
    }
    x += width + 70
  }
}"""
_BOX = """() => {
  const { nodes } = window.app.canvas.graph, { scale, offset } = window.app.canvas.ds
  const left = Math.min(...nodes.map((n) => n.pos[0])), top = Math.min(...nodes.map((n) => n.pos[1])) - 30
  const right = Math.max(...nodes.map((n) => n.pos[0] + n.size[0]))
  const bottom = Math.max(...nodes.map((n) => n.pos[1] + n.size[1]))
  const canvas = window.app.canvas.canvas.getBoundingClientRect()
  return [canvas.left + (left + offset[0]) * scale, canvas.top + (top + offset[1]) * scale,
    (right - left) * scale, (bottom - top) * scale]
}"""


def shot(canvas: Canvas, margin: int = 28) -> Image.Image:
    """The nodes on the canvas and a little around them."""
    left, top, width, height = canvas.page.evaluate(_BOX)
    clip = {"x": left - margin, "y": top - margin, "width": width + 2 * margin, "height": height + 2 * margin}
    return Image.open(io.BytesIO(canvas.page.screenshot(clip=clip, scale="css"))).convert("RGB")


def keep(picture: Image.Image, path: Path, limit: int = LIMIT) -> None:
    """As a PNG of as many colours as ``limit`` bytes allow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for colors in (256, 128, 64, 32):
        out = io.BytesIO()
        picture.quantize(colors, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= limit:
            break
    path.write_bytes(out.getvalue())
    log.info("%s: %d x %d, %d bytes", path.name, *picture.size, out.tell())


def put_files(server: Server) -> None:
    """Files of the names that are shown, or their nodes are framed in red. None of them is read."""
    for kind, name in (("diffusion_models", "flux1-dev"), ("text_encoders", "clip_l"), ("text_encoders", "t5xxl_fp16"),
                       ("vae", "ae"), ("loras", "my_style")):
        (server.base / "models" / kind / f"{name}.safetensors").touch()


def train(server: Server) -> None:
    """The demo's run, with pictures on the way."""
    g = Graph(json.loads((PACK / "tests/comfyui/prompts/demo.json").read_text(encoding="utf-8")))
    for value in g.values():
        if value["class_type"] == TRAIN:
            value["inputs"]["steps"] = STEPS
        if value["class_type"] == PREVIEWS:
            value["inputs"]["every_n_steps"] = 100
    error = server.run(g, seconds=1200).error
    assert not error, error


def help_pictures(canvas: Canvas, server: Server) -> None:
    for kind, columns in SCENES.items():
        canvas.page.evaluate(_BUILD, [columns, VALUES, SIZES])
        canvas.show(scale=0.9)
        canvas.page.evaluate("() => { window.app.canvas.ds.offset[1] += 100 }")  # clear of the frontend's own buttons
        if kind in QUEUED:
            canvas.queue()
            canvas.page.wait_for_timeout(1500)
            wait_idle(server, 600)
        canvas.page.wait_for_timeout(1500)
        keep(shot(canvas), PACK / f"web/docs/pictures/{kind}.png")


def show_demo(canvas: Canvas, server: Server) -> None:
    """The demo's graph, with what its nodes made."""
    demo(canvas, RUN, STEPS)
    with_previews(canvas, 100)
    canvas.queue()
    canvas.page.wait_for_timeout(1500)
    wait_idle(server, 600)


def thumbnails(canvas: Canvas, server: Server) -> None:
    for path in sorted(DEMO.parent.glob("*.json")):
        if path == DEMO:
            show_demo(canvas, server)
        else:
            canvas.load(json.loads(path.read_text(encoding="utf-8")))
        canvas.show(scale=0.5)
        canvas.page.wait_for_timeout(1500)
        picture = shot(canvas)
        picture.thumbnail((800, 800), Image.Resampling.LANCZOS)
        picture.save(path.with_suffix(".jpg"), quality=85)


def runs_tab(canvas: Canvas, server: Server) -> None:
    canvas.page.set_viewport_size({"width": 1400, "height": 900})
    show_demo(canvas, server)
    canvas.open_tab()
    canvas.page.locator(".runs button", has_text=RUN).click()
    canvas.page.locator(".pictures img").first.wait_for()
    canvas.page.evaluate("""() => {  // Train Steps and Loss Plot beside the tab
      const { ds, graph } = window.app.canvas, train = graph.nodes.find((n) => n.type === 'FluxFFTTrainSteps')
      ds.scale = 0.85
      ds.offset = [420 / ds.scale - train.pos[0], 140 / ds.scale - train.pos[1]]
      window.app.canvas.setDirty(true, true)
    }""")
    canvas.page.wait_for_timeout(3000)
    picture = Image.open(io.BytesIO(canvas.page.screenshot(scale="css"))).convert("RGB")
    keep(picture, PACK / "docs/images/runs.png", 200_000)


def demo_graph(canvas: Canvas, server: Server) -> None:
    """README's first picture: the demo's graph as it is when all of it has been queued."""
    canvas.page.set_viewport_size({"width": 1700, "height": 1058})
    demo(canvas, "first_run", 1500)
    canvas.queue()
    canvas.page.wait_for_timeout(2000)
    wait_idle(server, 1800)
    canvas.fit()
    canvas.page.wait_for_timeout(3000)
    picture = Image.open(io.BytesIO(canvas.page.screenshot(scale="css"))).convert("RGB")
    picture.save(PACK / "docs/images/canvas.png", optimize=True)  # all colours: a palette spoils the small pictures


def open_page(browser: Browser, server: Server) -> Canvas:
    canvas = Canvas(browser, server)
    canvas.page.set_viewport_size({"width": 2600, "height": 1900})
    server.post("/api/settings", {"Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False,
                                  "Comfy.NodeBadge.NodeSourceBadgeMode": "None"})
    canvas.reload()
    return canvas


def main(wanted: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    installs, looked = find_installs()
    assert installs, f"no ComfyUI at {looked}"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server, browser = Server(installs[0], Path(folder)), launch(playwright)
        try:
            put_files(server)
            train(server)
            canvas = open_page(browser, server)
            if "help" in wanted:
                help_pictures(canvas, server)
            if "thumbnails" in wanted:
                thumbnails(canvas, server)
            if "runs" in wanted:
                runs_tab(open_page(browser, server), server)
            if "demo" in wanted:
                demo_graph(open_page(browser, server), server)
        finally:
            browser.close()
            server.stop()


if __name__ == "__main__":
    main(sys.argv[1:] or ["help", "thumbnails", "runs", "demo"])

"""The real frontend in a real Chromium: opened, loaded with a workflow, looked at, and listened to for errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Playwright, Response, expect

from tests.browser.panel import Panel
from tests.comfyui.server import PACK_NAME, Server

ARTIFACTS = Path(__file__).parent / "artifacts"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
RENDERERS = ("classic", "vue")
"""The LiteGraph canvas, and Nodes 2.0."""
_HELPERS = """(() => {
  globalThis.textsOf = (scope) => [...document.querySelectorAll('*')].filter((e) => e.shadowRoot).flatMap((e) => [
    ...e.shadowRoot.querySelectorAll(`${scope} *`)]).filter((e) => e.checkVisibility({ visibilityProperty: true })
    && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
  globalThis.fieldsOf = (scope) => [...document.querySelectorAll('*')].filter((e) => e.shadowRoot).flatMap((e) => [
    ...e.shadowRoot.querySelectorAll(`${scope} :is(input, textarea, select)`)]).filter((e) => e.checkVisibility(
    { visibilityProperty: true }) && !['checkbox', 'range'].includes(e.type))
  const rgba = (text) => {
    const canvas = globalThis.probe ??= new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true })
    canvas.clearRect(0, 0, 1, 1)
    canvas.fillStyle = text
    canvas.fillRect(0, 0, 1, 1)
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data
    return [r, g, b, a / 255]
  }
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]))
  const ground = (element) => {
    const layers = []
    for (let e = element; e; e = e.parentElement ?? e.getRootNode().host) {
      layers.push(rgba(getComputedStyle(e).backgroundColor))
      if (layers[layers.length - 1][3] === 1) break
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255])
  }
  const light = (color) => color.map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
  globalThis.contrast = (element) => {
    const under = ground(element)
    const [a, b] = [light(over(rgba(getComputedStyle(element).color), under)), light(under)]
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
  }
})();
"""
expect.set_options(timeout=60_000)
OURS = (f"/extensions/{PACK_NAME}/", "/flux_fft/", "flux_fft", "FluxFFT")
THEIRS = ("PromptExecutionError", "api.comfy.org")
"""ComfyUI's own log of a prompt that it does not take, with the way it went; of its registry, out of reach here."""


def launch(playwright: Playwright) -> Browser:
    assert CHROMIUM is not None
    return playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


class Canvas:
    """One browser page on a server."""

    def __init__(self, browser: Browser, server: Server, *, renderer: str = "classic", theme: str = "dark") -> None:
        self.server = server
        self.renderer = renderer
        self.problems: list[str] = []
        """Console errors, exceptions and failed requests that concern the pack."""
        self.requests: list[str] = []
        """Requests to the pack's own routes, in order."""
        server.post("/api/settings", {
            "Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": renderer == "vue", "Comfy.ColorPalette": theme,
            "Comfy.Workflow.WarnBeforeClose": False, "Comfy.Release.Status": "skipped",
            "Comfy.RightSidePanel.IsOpen": False,
        })
        self.page: Page = browser.new_page(viewport={"width": 1400, "height": 900}, device_scale_factor=2)
        self.page.set_default_timeout(60_000)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self._on_error(error.stack or str(error)))
        self.page.on("response", self._on_response)
        self.page.on("request", lambda r: self.requests.append(r.url) if "/flux_fft/" in r.url else None)
        self.page.goto(f"http://127.0.0.1:{server.port}")
        self.wait_ready()

    def close(self) -> None:
        self.page.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        text = f"{message.type}: {message.text} ({message.location.get('url', '')})"
        told = any(mark in text for mark in OURS) and not any(mark in text for mark in THEIRS)
        if message.type in ("error", "warning") and told:
            self.problems.append(text)

    def _on_error(self, stack: str) -> None:
        if any(mark in stack for mark in OURS):
            self.problems.append(f"exception: {stack}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400 and any(mark in response.url for mark in OURS):
            self.problems.append(f"{response.status} {response.url}")

    # -- the frontend

    def wait_ready(self) -> None:
        """Until the frontend has loaded the pack's extension and drawn its first graph."""
        self.page.wait_for_function(
            "() => window.app?.canvas?.graph && window.app.extensions.some((e) => e.name === 'fluxfullfinetune.panel')")
        # It loads its default graph, or the last one, after that.
        self.page.wait_for_function("""() => window.app.canvas.graph.nodes.length > 0
          && (window.app.extensionManager?.workflow?.activeWorkflow ?? true)""")
        self.page.wait_for_timeout(500)

    def reload(self) -> None:
        self.page.reload()
        self.wait_ready()

    def load(self, workflow: dict[str, Any]) -> None:
        self.page.evaluate("async (workflow) => { await window.app.loadGraphData(workflow) }", workflow)
        self.page.wait_for_timeout(500)

    def show(self, *ids: int | str, scale: float = 1.0) -> None:
        """Move the view so that the nodes (none: all) lie at its upper left, at this scale."""
        self.page.evaluate(
            """([ids, scale]) => {
              const nodes = window.app.canvas.graph.nodes.filter((n) => !ids.length || ids.includes(String(n.id)))
              const left = Math.min(...nodes.map((n) => n.pos[0]))
              const top = Math.min(...nodes.map((n) => n.pos[1]))
              window.app.canvas.ds.scale = scale
              window.app.canvas.ds.offset = [90 / scale - left, 130 / scale - top]
              window.app.canvas.setDirty(true, true)
            }""", [[str(i) for i in ids], scale])
        self.page.wait_for_timeout(400)

    def fit(self) -> None:
        """Show the whole graph."""
        self.page.evaluate("""() => {
          const nodes = window.app.canvas.graph.nodes
          const left = Math.min(...nodes.map((n) => n.pos[0])), top = Math.min(...nodes.map((n) => n.pos[1])) - 40
          const right = Math.max(...nodes.map((n) => n.pos[0] + n.size[0]))
          const bottom = Math.max(...nodes.map((n) => n.pos[1] + n.size[1]))
          const scale = Math.min(1, 1240 / (right - left), 720 / (bottom - top))
          window.app.canvas.ds.scale = scale
          window.app.canvas.ds.offset = [90 / scale - left, 110 / scale - top]
          window.app.canvas.setDirty(true, true)
        }""")
        self.page.wait_for_timeout(600)

    def screenshot(self, name: str) -> Path:
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{name}-{self.server.install.version}-{self.renderer}.png"
        self.page.screenshot(path=path)
        return path

    def queue(self) -> None:
        """What the Run button does."""
        self.page.evaluate("() => { window.app.queuePrompt(0) }")

    def nodes(self) -> list[dict[str, Any]]:
        """id, type, size, widget names and values, outputs and whether the type is known."""
        return json.loads(self.page.evaluate("""() => JSON.stringify(window.app.canvas.graph.nodes.map((n) => ({
          id: String(n.id), type: n.type, size: [...n.size], properties: n.properties,
          known: n.type in window.LiteGraph.registered_node_types || n.type === 'Note' || n.type === 'MarkdownNote',
          missing: n.has_errors === true,
          widgets: (n.widgets ?? []).map((w) => [w.name, w.value]) })))"""))

    def api_prompt(self) -> dict[str, Any]:
        """The graph in API format, as the frontend sends it."""
        return json.loads(self.page.evaluate("async () => JSON.stringify((await window.app.graphToPrompt()).output)"))

    def saved(self) -> dict[str, Any]:
        """The graph as Save writes it."""
        return json.loads(self.page.evaluate("() => JSON.stringify(window.app.canvas.graph.serialize())"))

    def said(self, node: int | str) -> list[str]:
        """The lines that a node had to say when it ran, as shown on it."""
        return json.loads(self.page.evaluate("""(id) => {
          const widget = window.app.canvas.graph.getNodeById(id).widgets.find((w) => w.name === 'said')
          const lines = widget?.element.shadowRoot.querySelectorAll('.said > div') ?? []
          return JSON.stringify([...lines].map((line) => line.innerText))
        }""", str(node)))

    def wait_said(self, node: int | str, text: str) -> None:
        """Until a line that a node had to say holds ``text``."""
        for _ in range(600):
            if any(text in line for line in self.said(node)):
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"node {node} does not say {text!r}: {self.said(node)}")

    def toast(self, text: str) -> Locator:
        """The toast that says so; ComfyUI's own are found too."""
        return self.page.locator(".p-toast-message", has_text=text)

    def wait_quiet(self, seconds: float = 4.0) -> None:
        """Until the pack has asked its server for nothing for so long; what is on its way may come before."""
        for _ in range(10):
            asked = len(self.requests)
            self.page.wait_for_timeout(1000 * seconds)
            if len(self.requests) == asked:
                return
        raise AssertionError(f"it goes on asking: {self.requests[-5:]}")

    def open_tab(self) -> Locator:
        """Open the runs sidebar, unless it is; what lies in it."""
        tab = self.page.locator(".tab")
        if not tab.count():
            self.page.locator(".side-bar-button", has=self.page.locator(".pi-chart-line")).first.click()
        tab.wait_for()
        return self.page.locator(":root")

    def drop(self, path: Path, x: float, y: float) -> None:
        """Drop a file or folder of this machine on the page, as from a file manager."""
        session = self.page.context.new_cdp_session(self.page)
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data})
        session.detach()

    def contrasts(self, scope: str) -> list[str]:
        """Visible texts and fields within ``scope`` (in a shadow root) whose contrast is below 4.5 (WCAG AA), and it.

        Disabled controls are exempt, as in WCAG.
        """
        return json.loads(self.page.evaluate(_HELPERS + """(scope) => JSON.stringify(
          [...textsOf(scope), ...fieldsOf(scope)].filter((e) => !e.closest(':disabled')).map((e) => [contrast(e), e])
          .filter(([ratio]) => ratio < 4.5)
          .map(([ratio, e]) => `${ratio.toFixed(2)} ${e.className} ${e.value ?? e.textContent}`))""", scope))

    def cut_off(self, scope: str) -> list[str]:
        """Visible texts within ``scope`` that are wider than their place, or lie outside of it sideways."""
        return json.loads(self.page.evaluate(_HELPERS + """(scope) => JSON.stringify(textsOf(scope).filter((e) => {
          const box = e.getBoundingClientRect(), outer = e.closest(scope).getBoundingClientRect()
          const cut = e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1 && e.matches(':not(pre, .run-name)')
          return cut || box.left < outer.left - 1 || box.right > outer.right + 1
        }).map((e) => `${e.className} ${e.textContent}`))""", scope))

    # -- the panel

    def panel(self, node: int | str) -> Panel:
        return Panel(self, str(node))

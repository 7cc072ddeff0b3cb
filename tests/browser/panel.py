"""The status panel of a Train Steps node on a page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.browser.canvas import Canvas


class Panel:
    """The status panel of a Train Steps node, read as a user sees it."""

    def __init__(self, canvas: Canvas, node: str) -> None:
        self.canvas, self.node = canvas, node

    def read(self) -> dict[str, Any]:
        """The texts by their labels, state, run, line, hint; whether pause, stop can be pressed; the curve's points."""
        return json.loads(self.canvas.page.evaluate("""(id) => {
          const node = window.app.canvas.graph.getNodeById(id)
          const root = node.widgets.find((w) => w.name === 'status').element.shadowRoot
          const text = (css) => root.querySelector(css)?.textContent ?? null
          const facts = [...root.querySelectorAll('dl > div')].map((d) => [
            d.querySelector('dt').textContent, d.querySelector('dd').textContent])
          return JSON.stringify({
            ...Object.fromEntries(facts), state: text('.state'), run: text('.run-name'), line: text('.line'),
            hint: text('.hint'),
            pause: !root.querySelector('.pause').disabled, stop: !root.querySelector('.stop').disabled,
            curve: (root.querySelector('.bold').getAttribute('d') ?? '').split('L').length,
            last: root.querySelector('.steps span:last-child')?.textContent ?? '',
            error: root.querySelector('p').classList.contains('is-error'),
            box: (({ width, height, top, left }) => ({ width, height, top, left }))(
              root.querySelector('.panel').getBoundingClientRect()),
          })
        }""", self.node))

    def step(self) -> int:
        """The step it shows; -1: none."""
        text = (self.read()["step"] or "").split("/")[0].strip().replace(",", "")
        return int(text) if text else -1

    def wait(self, what: str, seconds: float = 120.0) -> dict[str, Any]:
        """Until ``what``, JavaScript over ``p`` (what ``read`` gives) and ``step``, is true."""
        deadline = int(seconds * 10)
        for _ in range(deadline):
            read = self.read()
            step = int((read.get("step") or "-1").split("/")[0].strip().replace(",", "") or -1)
            if self.canvas.page.evaluate(f"([p, step]) => {what}", [read, step]):
                return read
            self.canvas.page.wait_for_timeout(100)
        raise AssertionError(f"the panel did not come to show {what}: {self.read()}\n{self.canvas.server.tail(30)}")

    def press(self, button: str) -> None:
        """Click a button as a user does, where it is drawn, once it can be clicked."""
        self.canvas.page.wait_for_function("""([id, name]) => {
          const node = window.app.canvas.graph.getNodeById(id)
          const root = node.widgets.find((w) => w.name === 'status').element.shadowRoot
          const button = root.querySelector('.' + name)
          return button && !button.disabled && button.checkVisibility({ visibilityProperty: true })
        }""", arg=[self.node, button])
        spot = json.loads(self.canvas.page.evaluate("""([id, name]) => {
          const node = window.app.canvas.graph.getNodeById(id)
          const root = node.widgets.find((w) => w.name === 'status').element.shadowRoot
          const box = root.querySelector('.' + name).getBoundingClientRect()
          return JSON.stringify([box.left + box.width / 2, box.top + box.height / 2])
        }""", [self.node, button]))
        self.canvas.page.mouse.click(*spot)

    def cut_off(self) -> list[str]:
        """Texts of the panel that are wider than their place, or lie outside the panel."""
        return json.loads(self.canvas.page.evaluate("""(id) => {
          const node = window.app.canvas.graph.getNodeById(id)
          const root = node.widgets.find((w) => w.name === 'status').element.shadowRoot
          const panel = root.querySelector('.panel').getBoundingClientRect()
          const found = []
          for (const element of root.querySelectorAll('.state, button, dd, dt, .values span, .steps span')) {
            if (!element.checkVisibility({ visibilityProperty: true }) || !element.textContent) continue
            const box = element.getBoundingClientRect()
            const out = box.left < panel.left - 1 || box.right > panel.right + 1 || box.bottom > panel.bottom + 1
            const cut = element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1
            if (out || cut) found.push(element.textContent)
          }
          return JSON.stringify(found)
        }""", self.node))

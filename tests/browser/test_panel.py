"""The panel over a real run: the demo graph is queued on the real canvas, watched, reloaded, paused, stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.browser.canvas import Canvas
from tests.browser.panel import Panel
from tests.browser.runs import MANY, demo, skip_old_vue, step_of, stop, wait_idle, with_previews
from tests.comfyui.server import Server


@pytest.mark.parametrize("renderer, theme", [("classic", "light"), ("vue", "dark")])
def test_without_a_run_the_panel_says_so_and_keeps_quiet(
        canvas: Callable[..., Canvas], server: Server, renderer: str, theme: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer, theme=theme)
    train = demo(page, "never_started", 100)
    page.show(train)
    panel = page.panel(train)
    panel.wait("p.state === 'No run yet' && !p.pause && !p.stop && p.run === ''")
    page.screenshot(f"panel-no-run-{theme}")
    assert panel.cut_off() == []
    page.wait_quiet()


@pytest.mark.parametrize("renderer, theme", [("classic", "dark"), ("vue", "light")])
def test_a_run_is_followed_live_across_a_reload_and_paused_and_stopped(
        canvas: Callable[..., Canvas], server: Server, record_property: Callable[[str, object], None],
        renderer: str, theme: str) -> None:
    skip_old_vue(server, renderer)
    page = canvas(renderer=renderer, theme=theme)
    run = f"live_{renderer}_{theme}"
    train = demo(page, run, MANY)
    page.show(train)
    panel = page.panel(train)
    page.queue()
    try:
        panel.wait("p.state === 'Training' && step > 30", 180)
        assert panel.read()["run"] == run
        _keeps_up(page, panel, run, record_property)
        page.screenshot(f"panel-training-{theme}")
        assert panel.cut_off() == [] and page.contrasts(".panel") == []
        page.show(train, scale=1.5)
        page.screenshot(f"panel-training-150-{theme}")
        assert panel.cut_off() == []

        before = panel.read()
        page.reload()
        after = panel.wait(f"p.state === 'Training' && p.run === '{run}' && p.curve >= {min(before['curve'], 500)}")
        assert step_of(after) >= step_of(before)
        panel.wait(f"step > {step_of(after)}")
        page.show(train)

        panel.press("pause")
        panel.wait("p.state === 'Paused'")
        wait_idle(server)
        paused = panel.wait(f"!p.pause && p.stop && !p.error && step === {server.steps(run)[-1]}")
        page.screenshot(f"panel-paused-{theme}")

        page.queue()
        panel.wait(f"p.state === 'Training' && step > {step_of(paused)}")
        panel.press("stop")
        panel.wait("p.state === 'Stopped' && !p.pause && !p.stop")
        wait_idle(server)
        page.screenshot(f"panel-stopped-{theme}")
        page.wait_quiet()
        # Every step once, none lost and none twice, through all of this.
        steps = server.steps(run)
        assert steps == list(range(1, len(steps) + 1))
        panel.wait(f"step === {len(steps)}")
    finally:
        stop(server, run)


def _keeps_up(page: Canvas, panel: Panel, run: str, record: Callable[[str, object], None]) -> None:
    """Whatever step is made, the panel comes to show it; how late is told (a second on a machine that is free)."""
    lags = []
    for _ in range(8):
        newest, began = page.server.steps(run)[-1], time.monotonic()
        panel.wait(f"step >= {newest}")
        lags.append(time.monotonic() - began)
    record("the panel shows a step within", f"{sorted(lags)[4]:.2f} s, at most {max(lags):.2f} s")


def test_a_finished_run_and_one_that_is_queued_again_say_so(canvas: Callable[..., Canvas], server: Server) -> None:
    page = canvas()
    train = demo(page, "short", 12)
    with_previews(page, 6)
    page.show(train)
    panel = page.panel(train)
    page.queue()
    try:
        panel.wait("p.state === 'Finished' && p.step === '12 / 12' && p.curve === 12", 300)
        wait_idle(server)
        # The previews themselves, and not the picture that was shown as the progress.
        page.page.wait_for_function("""(id) => {
          const pictures = window.app.canvas.graph.getNodeById(id).imgs ?? []
          return pictures.length >= 4 && pictures.every((picture) => !picture.src.startsWith('blob:'))
        }""", arg=train)
        trained = server.steps("short")
        page.queue()
        shown = panel.wait("p.state === 'Finished' && p.line.startsWith('Queued again')")  # the cache answered
        assert "target of 12" in shown["hint"] and "raise steps" in shown["hint"]
        wait_idle(server)
        assert server.steps("short") == trained
        start = next(n for n in page.nodes() if n["type"] == "FluxFFTStart")
        page.wait_said(start["id"], "16 pictures")
        plot = next(n for n in page.nodes() if n["type"] == "FluxFFTLossPlot")["id"]
        _wait_said_fits(page, plot)
        page.fit()
        page.screenshot("finished")
        saved = page.saved()
        node = next(n for n in saved["nodes"] if str(n["id"]) == train)
        assert node["properties"]["flux_fft_run"] == "short" and len(node["widgets_values"]) == 1
        assert set(page.api_prompt()[train]["inputs"]) <= {"run", "steps", "previews", "after"}

        page.reload()
        panel.wait("p.state === 'Finished' && p.line.includes('raise steps')")  # the browser has forgotten the rest
        page.queue()
        panel.wait("p.line.startsWith('Queued again') && p.hint.includes('raise steps')")
        _wait_said_fits(page, plot)  # the picture was there before the text
        page.show(plot)
        page.screenshot("requeued-loss-plot")
    finally:
        stop(server, "short")


def _wait_said_fits(page: Canvas, node: str) -> None:
    """Until a node's text lies inside it, above its picture."""
    page.page.wait_for_function("""(id) => {
      const node = window.app.canvas.graph.getNodeById(id)
      const at = (name) => node.widgets.findIndex((w) => w.name === name)
      if (at('said') < 0) return false
      node.arrange?.()
      const said = node.widgets[at('said')], picture = at('$$canvas-image-preview')
      const bottom = said.y + 10 + said.element.offsetHeight
      return bottom <= node.size[1] && (picture < 0 || bottom <= node.widgets[picture].y)
    }""", arg=node)

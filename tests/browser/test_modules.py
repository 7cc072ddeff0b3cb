"""The panel's arithmetic, run in a real JavaScript engine without ComfyUI."""

from __future__ import annotations

import http.server
import json
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from trainer.plot import smoothed

WEB = Path(__file__).resolve().parents[2] / "web"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    extensions_map = {".mjs": "text/javascript", ".html": "text/html"}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def js(browser: Browser) -> Iterator[Callable[[str], Any]]:
    """Evaluate an expression that may use the modules ``losses``, ``format``."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(WEB))) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{files.server_port}/docs/")

        def evaluate(expression: str) -> Any:
            return json.loads(page.evaluate(
                f"async () => {{ const losses = await import('/losses.mjs'), format = await import('/format.mjs');"
                f" return JSON.stringify({expression}) }}"))

        yield evaluate
        page.close()
        files.shutdown()


def test_numbers_are_short_and_true(js: Callable[[str], Any]) -> None:
    given = [0, 0.02134, 1.2549, 123.4, 3.5e-6, 1.2e-4, 250000, -0.5, None]
    assert js(f"{json.dumps(given)}.map(format.figure)") == [
        "0", "0.0213", "1.25", "123", "3.5e-6", "1.2e-4", "2.5e5", "-0.5", ""]
    assert js("[0.0421, 0.42, 9.84, 9.96, 62.4].map(format.seconds)") == ["0.042 s", "0.42 s", "9.8 s", "10 s", "62 s"]
    assert js("[0, 59.6, 61, 3599, 3600, 11100, 90000, -1].map(format.duration)") == [
        "0 s", "1 min", "1 min", "1 h 00 min", "1 h 00 min", "3 h 05 min", "1 d 1 h", ""]
    assert js("[0, 1500, 1234567].map(format.count)") == ["0", "1,500", "1,234,567"]


def test_the_smooth_line_begins_at_the_first_loss_and_is_the_loss_plots(js: Callable[[str], Any]) -> None:
    points = [(i, 0.2 + 1.8 * math.exp(-i / 30) + 0.1 * math.sin(7 * i)) for i in range(1, 301)]
    bins = json.dumps([[step, loss, loss, loss, 1] for step, loss in points])
    share = js(f"losses.smoothingShare({bins})")
    assert share == pytest.approx(0.9), "Loss Plot's default"
    line = js(f"losses.smooth({bins}, {share})")
    assert line[0] == pytest.approx(points[0][1])
    assert line == pytest.approx([loss for _, loss in smoothed(points, 0.9)])
    assert js(f"losses.smooth({bins}.slice(0, 20), {share})") == pytest.approx(line[:20]), "it does not move later"
    assert js("losses.smoothingShare([[10000, 1, 1, 1, 10000]])") == pytest.approx(0.98)


def test_merged_bins_smooth_much_as_single_steps_do(js: Callable[[str], Any]) -> None:
    single = js("losses.smooth(Array.from({length: 300}, (_, i) => [i + 1, Math.cos(i / 60), 0, 1, 1]), 0.95)")
    merged = js("""losses.smooth(Array.from({length: 100}, (_, i) => [3 * i + 3,
        [0, 1, 2].reduce((s, k) => s + Math.cos((3 * i + k) / 60), 0) / 3, 0, 1, 3]), 0.95)""")
    assert merged == pytest.approx(single[2::3], abs=0.02)


def test_a_long_curve_is_merged_and_loses_nothing(js: Callable[[str], Any]) -> None:
    kept = js("""(() => { const l = new losses.Losses()
      for (let i = 1; i <= 9001; i++) l.append([[i, Math.sin(i), Math.sin(i), Math.sin(i), 1]])
      const sum = (f) => l.bins.reduce((s, b) => s + f(b), 0)
      return { most: l.bins.length, steps: sum((b) => b[4]), mean: sum((b) => b[1] * b[4]) / 9001,
               low: Math.min(...l.bins.map((b) => b[2])), high: Math.max(...l.bins.map((b) => b[3])),
               last: l.lastStep } })()""")
    values = [math.sin(i) for i in range(1, 9002)]
    assert kept["most"] <= 2000 and kept["steps"] == 9001 and kept["last"] == 9001
    assert kept["mean"] == pytest.approx(sum(values) / 9001, abs=1e-9)
    assert kept["low"] == pytest.approx(min(values), abs=1e-9) and kept["high"] == pytest.approx(max(values), abs=1e-9)


def test_steps_that_are_known_are_not_counted_twice(js: Callable[[str], Any]) -> None:
    assert js("""(() => { const l = new losses.Losses([[1, 5, 5, 5, 1], [2, 4, 4, 4, 1]])
      l.append([[2, 9, 9, 9, 1], [3, 3, 3, 3, 1], [4, null, null, null, 1]])
      return l.bins.map((b) => b.slice(0, 2)) })()""") == [[1, 5], [2, 4], [3, 3]]


def test_the_range_shows_the_curve_and_not_one_spike(js: Callable[[str], Any]) -> None:
    low, high = js("""(() => { const bins = Array.from({length: 200}, (_, i) => {
      const v = i === 60 ? 50 : 0.4 + 0.1 * Math.sin(i)
      return [i + 1, v, v, v, 1] })
      return losses.valueRange(bins, bins.map(() => 0.4)) })()""")
    assert 0.2 < low < 0.31 and 0.49 < high < 0.6
    low, high = js("losses.valueRange([[1, 2, 2, 2, 1], [2, 2, 2, 2, 1]], [2, 2])")
    assert low < 2 < high


@pytest.mark.parametrize("steps", [12, 300, 3000])
def test_the_range_holds_the_first_losses_and_goes_logarithmic_beyond_a_decade(
        js: Callable[[str], Any], steps: int) -> None:
    low, high, log, marks = js(f"""(() => {{ const bins = Array.from({{length: {steps}}}, (_, i) => {{
      const v = i ? 0.15 + 0.5 * Math.exp(-i / 20) : 2.0
      return [i + 1, v, v, v, 1] }})
      const [low, high] = losses.valueRange(bins, losses.smooth(bins, 0.9))
      return [low, high, losses.isLogarithmic(low, high), losses.logTicks(low, high)] }})()""")
    assert 0 < low < 0.15 + 0.5 * math.exp(-(steps - 1) / 20) and high > 2.0
    assert log is (steps > 12)
    assert len(marks) >= 2 and all(low <= mark <= high for mark in marks) and marks == sorted(marks)
    assert js("losses.logTicks(1e-9, 1e3).length") <= 7
    few = js("losses.logTicks(0.04, 0.09)")
    assert len(few) >= 2 and all(0.04 <= mark <= 0.09 for mark in few), "only one mark of a decade is inside"


@pytest.mark.parametrize("low, high", [(0, 1), (0.213, 0.498), (-3, 12345), (1e-7, 3e-7), (0.4, 0.40001)])
def test_ticks_are_few_round_and_inside(js: Callable[[str], Any], low: float, high: float) -> None:
    found = js(f"losses.ticks({low}, {high})")
    assert 2 <= len(found) <= 5 and found == sorted(found)
    assert low - 1e-12 <= found[0] and found[-1] <= high + 1e-12


def test_ten_thousand_points_draw_within_a_frame(
        js: Callable[[str], Any], record_property: Callable[[str, object], None]) -> None:
    took = js("""await (async () => { const { LossChart } = await import('/chart.mjs')
      const bins = Array.from({length: 10000}, (_, i) => { const v = Math.random(); return [i + 1, v, v, v, 1] })
      const l = new losses.Losses(bins), chart = new LossChart(); document.body.append(chart.element)
      const times = []
      for (let i = 0; i < 15; i++) { const t = performance.now()
        l.append([[10001 + i, .5, .5, .5, 1]])
        chart.draw(l.bins)
        chart.element.getBoundingClientRect(); times.push(performance.now() - t) }
      return times.sort((a, b) => a - b)[7] })()""")
    record_property("10,000 points are drawn in", f"{took:.1f} ms")
    assert took < 16, f"10,000 points took {took:.1f} ms, the median of 15 draws: a frame is 16 ms"


_ZOOMED = """
  const { LossChart } = await import('/chart.mjs')
  const value = (step) => 1 + Math.sin(step)
  const bin = (first, last) => { const all = Array.from({length: last - first + 1}, (_, i) => value(first + i))
    return [last, all.reduce((a, b) => a + b) / all.length, Math.min(...all), Math.max(...all), all.length, 1e-5] }
  const curve = new losses.Losses(Array.from({length: 1000}, (_, i) => bin(4 * i + 1, 4 * i + 4)))
  const asked = []
  const server = (first, last) => Array.from({length: last - first + 1}, (_, i) => bin(first + i, first + i))
  const chart = new LossChart(async (first, last) => { asked.push([first, last]); return server(first, last) })
  chart.element.style.cssText = 'width: 360px; height: 200px'
  const style = document.createElement('style')
  style.textContent = (await import('/style.mjs')).STYLE
  document.body.replaceChildren(style, chart.element)
  const draw = () => chart.draw(curve.bins, [], curve.age)
  const settle = (milliseconds = 0) => new Promise((resolve) => setTimeout(resolve, milliseconds))
  const shown = () => chart.points.filter((bin) => bin[0] >= chart.zoom[0] && bin[0] <= chart.zoom[1])
  draw()
"""


def test_a_zoom_asks_for_the_single_steps_once_and_again_only_where_they_can_differ(js: Callable[[str], Any]) -> None:
    asked, single, total, more, smooth = js(f"""await (async () => {{ {_ZOOMED}
      chart.show([2002.5, 2100.2]); await settle()
      const [single, total] = [shown().map((b) => b[4]), chart.points.reduce((sum, b) => sum + b[4], 0)]
      const smooth = chart.smoothed[chart.points.findIndex((b) => b[0] === 2100)]
      for (let step = 4001; step <= 4100; step++) {{ curve.append([bin(step, step)]); draw(); await settle() }}
      await settle(1100)
      const later = chart.smoothed[chart.points.findIndex((b) => b[0] === 2100)]
      return [[...asked], single, total, asked.length, [smooth, later]]
    }})()""")
    assert asked == [[2001, 2104]] and more == 1, "it ends before the newest step: it rests"
    assert single == [1] * 98 and total == 4000, "no step is counted twice, or left out"
    assert smooth[0] == pytest.approx(smooth[1], abs=0.02)


def test_a_zoom_follows_a_curve_that_was_read_anew_at_most_once_a_second(js: Callable[[str], Any]) -> None:
    asked, last, after, back = js(f"""await (async () => {{ {_ZOOMED}
      chart.show([2001, 2100]); await settle()
      curve.replace(Array.from({{length: 510}}, (_, i) => bin(4 * i + 1, 4 * i + 4)))  // it went back to step 2,040
      const begin = performance.now()
      for (let i = 0; i < 40; i++) {{
        curve.append([bin(2041 + i, 2041 + i)]); draw(); await settle(50)
      }}
      await settle(1200)
      const seconds = (performance.now() - begin) / 1000
      const last = shown().map((b) => [b[0], b[4]])
      const after = asked.length
      await settle(1500)
      const still = asked.length - after
      chart.show(null)
      return [[after, seconds], last, still, [chart.points.length, curve.bins.length]]
    }})()""")
    assert 2 <= asked[0] <= asked[1] + 2, "once a second at most"
    assert last == [[step, 1] for step in range(2001, 2081)] and after == 0
    assert back[0] == back[1], "all of it is seen again"


def test_where_nothing_is_merged_or_nothing_fits_nothing_is_asked(js: Callable[[str], Any]) -> None:
    assert js(f"""await (async () => {{ {_ZOOMED}
      chart.show([1, 3900]); await settle()
      const wide = asked.length
      curve.replace(Array.from({{length: 900}}, (_, i) => bin(i + 1, i + 1))); chart.show(null); draw()
      chart.show([10, 20]); await settle()
      chart.show([12.2, 12.9])
      return [wide, asked.length, chart.zoom] }})()""") == [0, 0, [10, 20]]


def test_the_legend_names_every_curve_and_does_not_move_when_one_comes(js: Callable[[str], Any]) -> None:
    texts, before, after, pressed = js(f"""await (async () => {{ {_ZOOMED}
      const place = () => [...chart.element.querySelectorAll('.mark, .plot')].map((e) => {{
        const box = e.getBoundingClientRect(); return [box.left, box.top, box.width, box.height] }})
      const marks = [...chart.element.querySelectorAll('.marks .mark')]
      const seen = () => marks.map((mark) => getComputedStyle(mark).visibility)
      const before = [place(), seen()]
      chart.draw(curve.bins, [[10, 1.5]], curve.age)
      const after = [place(), seen()]
      marks[0].click()
      return [marks.map((mark) => [mark.textContent, mark.title.length > 20]), before, after,
        marks.map((mark) => mark.getAttribute('aria-pressed'))] }})()""")
    assert texts == [[text, True] for text in ("each step", "smoothed", "learning rate", "validation (fixed noise)")]
    assert before[0] == after[0]
    assert before[1] == ["visible"] * 3 + ["hidden"] and after[1] == ["visible"] * 4
    assert pressed == ["false", "true", "true", "true"]


def test_every_language_says_all_that_english_does(browser: Browser) -> None:
    shape = ("const shape = (t) => Object.entries(t).sort(([a], [b]) => a < b ? -1 : 1)"
             ".map(([k, v]) => [k, typeof v === 'object' ? shape(v) : typeof v]);")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(WEB))) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{files.server_port}/docs/")
        english = page.evaluate(f"async () => {{ {shape} return shape((await import('/strings.mjs')).TEXT) }}")
        for other in sorted(WEB.glob("strings_*.mjs")):
            code = other.stem.removeprefix("strings_").upper()
            found = page.evaluate(f"async () => {{ {shape} return shape((await import('/{other.name}')).{code}) }}")
            assert found == english, other.name
        page.close()
        files.shutdown()

"""The panel while a save point is written, and of a run that rests in memory: what stands there, and when it goes."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.browser.canvas import Canvas
from tests.browser.runs import MANY, demo, stop, wait_idle
from tests.comfyui.server import Server
from trainer.run import RunDirectory
from trainer.saves import underway


def test_how_far_a_save_is_stands_on_the_panel_until_it_is_done(canvas: Callable[..., Canvas], server: Server) -> None:
    """The bytes are put there by the test, as slowly as a page can be looked at: the run's worker rests."""
    page = canvas(renderer="classic", theme="dark")
    train = demo(page, "saves", MANY)
    page.show(train)
    page.queue()
    panel = page.panel(train)
    panel.wait("step >= 2")
    panel.press("pause")
    rests = panel.wait("p.state === 'Paused' && /RAM/.test(p.line + p.hint)")
    told = rests["line"] + rests["hint"]
    assert re.search(r"The run holds \d+(\.\d+)? GB of RAM until it has rested for \d+ min: Stop saves", told), told
    wait_idle(server)

    run = RunDirectory(server.home / "saves")
    step = run.status()["step"]
    part = run.path / "state" / f".part-step-{step:06d}-test"
    part.mkdir()
    with underway.noted(run.path, underway.SAVE_POINT, step, 1000):
        for share in (12, 45):
            (part / "a.safetensors").write_bytes(bytes(10 * share))
            panel.wait(f"p.line === 'Writing save point ... {share} %'", seconds=10)
            page.screenshot(f"panel-saving-{share}")
    (part / "a.safetensors").unlink()
    part.rmdir()
    panel.wait("!/Writing/.test(p.line + p.hint)", seconds=10)
    assert run.status()["saving"] is None
    stop(server, "saves")
    panel.wait("p.state === 'Stopped' && !/RAM until/.test(p.line + p.hint)")

"""One server per ComfyUI version and one Chromium; skipped, with a line that says so, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comfyui.server import Install, Server, find_installs

pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -r requirements-dev.txt")

from playwright.sync_api import Browser, sync_playwright

from tests.browser.canvas import CHROMIUM, Canvas, launch

INSTALLS, LOOKED_AT = find_installs()
NO_COMFYUI = f"no ComfyUI at {LOOKED_AT}: set COMFYUI_PATH to test against one"
NO_CHROMIUM = "no chromium on the PATH: install it to test the canvas"


NEIGHBOUR = "another_pack"
"""A pack of somebody else's, to see that it is left alone."""


def _write_neighbour(folder: Path) -> None:
    (folder / "web").mkdir(parents=True)
    (folder / "__init__.py").write_text('NODE_CLASS_MAPPINGS = {}\nWEB_DIRECTORY = "./web"\n')
    (folder / "web" / "theirs.mjs").write_text("export {}\n")


def pytest_report_header() -> str:
    versions = ", ".join(f"{i.version} ({i.path})" for i in INSTALLS) or NO_COMFYUI
    return f"browser: {CHROMIUM or NO_CHROMIUM}; {versions}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests have measured (``record_property``) is told, whether they pass or not."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind) if r.when == "call"]
    for report in reports:
        for what, value in report.user_properties:
            terminalreporter.write_line(f"measured: {what} {value} ({report.nodeid.rpartition('::')[2]})")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "install" in metafunc.fixturenames:
        missing = pytest.param(None, marks=pytest.mark.skip(reason=NO_COMFYUI), id="none")
        metafunc.parametrize("install", INSTALLS or [missing], ids=lambda i: i.version if i else "none", indirect=True,
                             scope="session")


@pytest.fixture(scope="session")
def install(request: pytest.FixtureRequest) -> Install:
    return request.param


@pytest.fixture(scope="session")
def server(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp(f"browser-{install.version}")
    _write_neighbour(base / "custom_nodes" / NEIGHBOUR)
    running = Server(install, base)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with sync_playwright() as playwright:
        running = launch(playwright)
        try:
            yield running
        finally:
            running.close()


@pytest.fixture
def canvas(browser: Browser, server: Server) -> Iterator[Callable[..., Canvas]]:
    """Open pages: ``canvas(renderer=..., theme=...)``. At the end none may have had a problem with the pack's files."""
    opened: list[Canvas] = []

    def open_one(**options: str) -> Canvas:
        opened.append(Canvas(browser, server, **options))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
    assert [problem for one in opened for problem in one.problems] == []

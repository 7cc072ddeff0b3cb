"""One server per ComfyUI version and test module; skipped, with a line that says so, where there is no ComfyUI."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comfyui.server import Install, Server, find_installs
from trainer.demo_data import write_demo

INSTALLS, LOOKED_AT = find_installs()
NONE = f"no ComfyUI at {LOOKED_AT}: set COMFYUI_PATH to test against one"


def pytest_report_header() -> str:
    return "comfyui: " + (", ".join(f"{i.version} ({i.path})" for i in INSTALLS) or NONE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "install" in metafunc.fixturenames:
        missing = pytest.param(None, marks=pytest.mark.skip(reason=NONE), id="none")
        metafunc.parametrize("install", INSTALLS or [missing], ids=lambda i: i.version if i else "none", scope="module",
                             indirect=True)


@pytest.fixture(scope="module")
def install(request: pytest.FixtureRequest) -> Install:
    return request.param


@pytest.fixture(scope="module")
def server(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base: Path = tmp_path_factory.mktemp(f"comfyui-{install.version}")
    running = Server(install, base)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def placed(server: Server) -> Server:
    """The demo's files where a user's files are: in the models folders and the input folder."""
    files = write_demo(server.base / "demo_files")
    shutil.copy(files["flux"], server.base / "models/diffusion_models/flux_demo.safetensors")
    shutil.copy(files["captions"], server.base / "models/text_encoders/demo_captions.safetensors")
    shutil.copy(files["vae"], server.base / "models/vae/demo_vae.safetensors")
    shutil.copytree(files["drawings"], server.base / "input/drawings")
    return server

"""The panel's server side: HTTP routes under ``/flux_fft/`` and the websocket's ``flux_fft.event``.

==============================  ====================================================================================
``GET runs``                    ``runs`` (status of each, the last used first), ``places`` (which node shows which)
``GET runs/NAME``               snapshot: ``status``, ``n``, ``losses`` (``follow.bins``), ``samples`` and ``about``
``GET runs/NAME/samples/FILE``  a picture
``POST runs/NAME/pause|stop``   asks the run's worker; answers once it is paused, or saved and gone
``flux_fft.event``              the status and ``about``, with ``since``, ``n``, ``losses``, ``reset``, ``places``
==============================  ====================================================================================

``about`` is two fields: ``note``, what the node that trains the run does now, and ``held``, whether such a node waits.
A reader takes a snapshot (all events up to ``n``), then events: one whose ``since`` is above what it knows means that
it missed some, and takes a new snapshot. Failures are answered as ``{"error": one line}``. Whatever blocks runs in
threads of its own, never on ComfyUI's event loop. Importing this registers the routes where a server is; it loads no
torch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..trainer.run import RunDirectory
from . import bridge
from .follow import Library, sample_path
from .pusher import Pusher

PREFIX = "/flux_fft"


def _send(event: str, data: dict[str, Any]) -> None:
    from server import PromptServer

    if PromptServer.instance is not None:
        PromptServer.instance.send_sync(event, data)


_pusher = Pusher(_send)
_library = Library()
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="flux_fft_routes")

watching, watch, unwatch = _pusher.watching, _pusher.watch, _pusher.unwatch
note, say = _pusher.note, _pusher.say


def _run_dir(name: str) -> Path:
    path = bridge.run_dir(name)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"there is no run {name!r} in {bridge.home()}")
    return path


def _list() -> dict[str, Any]:
    return {"runs": _library.statuses(bridge.home()), "places": _pusher.places()}


def _snapshot(name: str) -> dict[str, Any]:
    path = _run_dir(name)
    snapshot = _library.follower(path).snapshot()
    if snapshot["status"]["worker"] is not None:
        _pusher.follow(path)  # it may be trained from elsewhere: whoever looks at it sees it move
    return {**snapshot, **_pusher.about(path)}


def _sample(name: str, file: str) -> Path:
    path = sample_path(_run_dir(name), file)
    if path is None:
        raise FileNotFoundError(f"run {name!r} has no picture {file!r}")
    return path


def _ask(name: str, action: str) -> dict[str, Any]:
    from ..trainer import client

    path = _run_dir(name)
    answer = {"run": name, "asked": action}
    if not RunDirectory(path).locked():
        if action == "stop":
            return answer  # it is stopped
        raise RuntimeError(f"run {name!r} is not being trained: there is nothing to pause")
    with watching(path), client.open_run(path, launch=False) as worker:
        worker.pause() if action == "pause" else worker.stop()
    return answer


def register(routes: Any) -> None:
    """Add the routes to an aiohttp ``RouteTableDef``."""
    from aiohttp import web

    def answers(work: Callable[..., Any]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler that calls ``work`` with the parts of the path, in a thread, and answers with its result."""

        async def handler(request: web.Request) -> web.StreamResponse:
            loop = asyncio.get_running_loop()
            call = functools.partial(work, **request.match_info)
            try:
                result = await loop.run_in_executor(_threads, call)
            except FileNotFoundError as error:
                return web.json_response({"error": str(error)}, status=404)
            except ValueError as error:
                return web.json_response({"error": str(error)}, status=400)
            except (OSError, RuntimeError) as error:
                logging.warning("flux_fft: %s: %s", request.path, error)
                return web.json_response({"error": str(error)}, status=409)
            if isinstance(result, Path):
                return web.FileResponse(result, headers={"X-Content-Type-Options": "nosniff"})
            return web.json_response(result)

        return handler

    routes.get(f"{PREFIX}/runs")(answers(_list))
    routes.get(f"{PREFIX}/runs/{{name}}")(answers(_snapshot))
    routes.get(f"{PREFIX}/runs/{{name}}/samples/{{file}}")(answers(_sample))
    for action in ("pause", "stop"):
        routes.post(f"{PREFIX}/runs/{{name}}/{action}")(answers(functools.partial(_ask, action=action)))


def _register_with_comfyui() -> None:
    try:
        from server import PromptServer
    except ImportError:
        return  # no ComfyUI around: unit tests and tools
    if getattr(PromptServer, "instance", None) is not None:
        register(PromptServer.instance.routes)


_register_with_comfyui()

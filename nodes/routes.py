"""The panel's and the sidebar's server side: HTTP routes under ``/flux_fft/`` and the websocket's ``flux_fft.event``.

==============================  ====================================================================================
``GET runs``                    ``runs`` (status of each, the last used first), ``places`` (which node shows which)
``GET runs/NAME``               snapshot: ``status``, ``n``, ``losses`` (``follow.bins``), ``validation``, ``samples``
                                and ``about``
``GET runs/NAME/losses``        ``?first=&last=``: the ``losses`` and ``n`` of these steps alone, merged less
``GET runs/NAME/details``       settings, save points and what else there is (``details.details``)
``GET runs/NAME/prompt``        ``prompt``: the first of its previews
``GET runs/NAME/graph``         ``prompt`` and ``workflow`` of the graph that trained it last
``GET runs/NAME/log``           ``text``: the end of its worker's log
``GET runs/NAME/samples/FILE``  a picture; ``?side=256``: a small one
``POST runs/NAME/pause|stop``   asks the run's worker; answers once it is paused, or saved and gone. Pause with
                                ``{"elsewhere": true}``: unless a prompt of this ComfyUI trains it
``POST runs/NAME/save|lr``      a save point now; ``{"lr": number}`` from the next step
``POST runs/NAME/delete``       removes the run, ``{"stop": true}``: its worker is stopped first
``GET trained``                 ``prompts``: by the run's name, the id of the prompt of this ComfyUI that trains it;
                                ``ending``: of the last one that was told to end
``POST prompts/ID/end``         ends the prompt if it runs, as Cancel does: ``ended`` says whether it ran
``POST datasets``               ``{"name"}``: begins an upload, gives ``id``; then ``PUT datasets/ID?path=...`` each
                                file (a .zip on top is unpacked), ``POST datasets/ID/finish``, or ``DELETE datasets/ID``
``flux_fft.event``              the status and ``about``, with ``since``, ``n``, ``losses``, ``reset``, ``places``
==============================  ====================================================================================

``about`` is two fields: ``note``, what the node that trains the run does now, and ``held``, whether such a node waits.
A reader takes a snapshot (all events up to ``n``), then events: one whose ``since`` is above what it knows means that
it missed some, and takes a new snapshot. What a POST brings is JSON and says so. Failures are answered as
``{"error": one line}``. Whatever blocks runs in threads of its own, never on ComfyUI's event loop. Importing this
registers the routes where a server is; it loads no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..trainer.run import RunDirectory, RunLocked
from . import bridge, bridge_files, called_off, details, words
from .follow import Library, sample_path
from .pusher import Pusher
from .uploads import CHUNK, Uploads

PREFIX = "/flux_fft"
WEB = Path(__file__).resolve().parents[1] / "web"


def _send(event: str, data: dict[str, Any]) -> None:
    from server import PromptServer

    for happened in data.get("happened", ()):
        if happened["type"] == "exported":
            try:
                happened["listed"] = bridge_files.listed_as(happened.get("folder"), happened["file"])
            except Exception as error:  # an event is more than the name under which a loader has its file
                logging.warning("flux_fft: whether %s is listed cannot be told: %s", happened.get("file"), error)
    if PromptServer.instance is not None:
        PromptServer.instance.send_sync(event, data)


_pusher = Pusher(_send)
_library = Library()
_uploads = Uploads()
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="flux_fft_routes")
_patient = ThreadPoolExecutor(max_workers=8, thread_name_prefix="flux_fft_asks")
"""For what waits for a worker: looking must go on meanwhile."""

watching, watch, unwatch = _pusher.watching, _pusher.watch, _pusher.unwatch
note, say = _pusher.note, _pusher.say


def _run_dir(name: str) -> Path:
    path = bridge.run_dir(name)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"there is no run {name!r} in {bridge.home()}")
    return path


def _run(name: str) -> RunDirectory:
    return _library.follower(_run_dir(name)).run


# -- what is looked at


def _list() -> dict[str, Any]:
    return {"runs": _library.statuses(bridge.home()), "places": _pusher.places()}


def _snapshot(name: str) -> dict[str, Any]:
    path = _run_dir(name)
    snapshot = _library.follower(path).snapshot()
    if snapshot["status"]["worker"] is not None:
        _pusher.follow(path)  # it may be trained from elsewhere: whoever looks at it sees it move
    return {**snapshot, **_pusher.about(path)}


def _losses(name: str, first: str = "", last: str = "") -> dict[str, Any]:
    """The part of the curve from one step to another, in as many bins as the whole has in the snapshot."""
    asked = {"first": first, "last": last}
    for key, text in asked.items():
        if not (text.isascii() and text.isdecimal() and len(text) < 16):
            raise ValueError(f"{key} is {text[:20]!r}: give the steps as whole numbers, such as ?first=1&last=500")
    if int(first) > int(last):
        raise ValueError(f"first is {first} and last is {last}: give the earlier step first")
    return {"run": name, **_library.follower(_run_dir(name)).losses(int(first), int(last))}


def _sample(name: str, file: str, side: str = "") -> Path | bytes:
    path = sample_path(_run_dir(name), file)
    if path is None:
        raise FileNotFoundError(f"run {name!r} has no picture {file!r}")
    return details.small_picture(path, int(side)) if side.isdecimal() else path


# -- what is asked for


def _ask(name: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
    """Have the run's worker do something; what it answers comes as ``done``."""
    from ..trainer import client

    path = _run_dir(name)
    answer, run = {"run": name, "asked": action}, RunDirectory(path)
    if body.get("elsewhere") is True and name in called_off.prompts():
        return answer
    # A worker in training follows, and Train Steps sees what becomes of it; before that nobody could.
    waits = action in ("pause", "stop") and run.status()["state"] != "training" and called_off.call_off(run.path)
    if not run.locked():
        if action == "stop" or waits:
            return answer  # it is, or will be: it has no worker
        raise RuntimeError(f"run {name!r} is not in memory: queue its graph first")
    lr = body.get("lr", 0.0)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr <= 1:
        raise ValueError(f"the learning rate is {lr!r}: give a number from 0 to 1, such as 3.5e-6")
    with watching(path), client.open_run(path, launch=False) as worker:
        done = {"pause": worker.pause, "stop": worker.stop, "save": worker.save,
                "lr": lambda: worker.set_lr(lr)}[action]()
    return {**answer, "done": done}


def _delete(name: str, body: dict[str, Any]) -> dict[str, Any]:
    path = _run_dir(name)
    run = RunDirectory(path)
    if run.locked() and body.get("stop") is True:
        _ask(name, "stop", {})
    try:
        run.delete()
    except RunLocked:
        raise RuntimeError(f"run {name!r} is open in a worker: stop it first") from None
    return {"run": name, "deleted": True}


def _begin_upload(body: dict[str, Any]) -> dict[str, Any]:
    upload = _uploads.begin(Path(bridge.input_path(".")), str(body.get("name", "")))
    return {"id": upload.id, "name": upload.name}


def _finish_upload(key: str) -> dict[str, Any]:
    upload = _uploads.get(key)
    try:
        return upload.finish()
    finally:
        _uploads.end(key)
        upload.drop()


def _drop_upload(key: str) -> dict[str, Any]:
    _uploads.end(key).drop()
    return {"dropped": key}


async def _receive(request: Any) -> dict[str, Any]:
    """One file of an upload, written as it comes."""
    loop = asyncio.get_running_loop()
    key, path = request.match_info["key"], request.query.get("path", "")

    def in_thread(call: Callable[..., Any], *args: Any) -> Any:
        return loop.run_in_executor(_threads, call, *args)

    upload = _uploads.get(key)
    zipped = path.lower().endswith(".zip") and "/" not in path
    try:
        target = upload.spool() if zipped else await in_thread(upload.place, path)
        if target is None:
            return {"skipped": path}
        file = await in_thread(open, target, "wb")
        try:
            async for data in request.content.iter_chunked(CHUNK):
                await in_thread(upload.write, file, data)
        finally:
            await in_thread(file.close)
        if zipped:
            await in_thread(upload.unpack, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # another file of it may have failed before
            _uploads.end(key)
        await in_thread(upload.drop)
        raise
    return {"pictures": upload.pictures, "texts": upload.texts, "bytes": upload.bytes}


# -- how it is served


def keep_fresh(app: Any) -> None:
    """Have browsers ask whether a file of the pack's frontend is still as they keep it, before they use it.

    ComfyUI says nothing of ``.mjs`` files, and lets pictures be kept for a day: after an upgrade, browsers would run
    modules of before for as long as they like. Nobody else's files are touched.
    """
    from aiohttp import web

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        files = request.match_info.route.resource
        if isinstance(files, web.StaticResource) and files.get_info().get("directory") == WEB:
            response.headers["Cache-Control"] = "no-cache"  # keep it, but ask: unchanged files are not sent again

    app.on_response_prepare.append(on_prepare)


def register(routes: Any) -> None:
    """Add the routes to an aiohttp ``RouteTableDef``."""
    from aiohttp import web

    def error(status: int, problem: Exception) -> web.Response:
        line = " ".join(words.encodable(str(problem)).split())
        return web.json_response({"error": line or type(problem).__name__}, status=status)

    def answers(work: Callable[..., Any], *, body: bool = False, query: tuple[str, ...] = (),
                threads: ThreadPoolExecutor = _threads) -> Callable[[web.Request], Any]:
        """A handler that calls ``work`` with the parts of the path, in a thread, and answers with its result."""

        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                given: dict[str, Any] = dict(request.match_info)
                given |= {key: request.query[key] for key in query if key in request.query}
                if body:
                    # Browsers let any page send what is no JSON: ComfyUI refuses that on this machine, not on others.
                    if request.content_type != "application/json":
                        raise ValueError("the request is no application/json: send it as that")
                    given["body"] = details.load_json(await request.text())
                if asyncio.iscoroutinefunction(work):
                    result = await work(request)
                else:
                    call = functools.partial(work, **given)
                    result = await asyncio.get_running_loop().run_in_executor(threads, call)
            except FileNotFoundError as problem:
                return error(404, problem)
            except ValueError as problem:
                return error(400, problem)
            except (OSError, RuntimeError) as problem:
                logging.warning("flux_fft: %s: %s", request.path, problem)
                return error(409, problem)
            if isinstance(result, Path):
                return web.FileResponse(result, headers={"X-Content-Type-Options": "nosniff"})
            if isinstance(result, bytes):
                return web.Response(body=result, content_type="image/jpeg", headers={"Cache-Control": "max-age=3600"})
            return web.json_response(result)

        return handler

    run = f"{PREFIX}/runs/{{name}}"
    routes.get(f"{PREFIX}/runs")(answers(_list))
    routes.get(run)(answers(_snapshot))
    routes.get(f"{run}/losses")(answers(_losses, query=("first", "last")))
    routes.get(f"{run}/details")(answers(lambda name: details.details(_run(name))))
    routes.get(f"{run}/prompt")(answers(lambda name: {"prompt": details.first_prompt(_run(name))}))
    routes.get(f"{run}/graph")(answers(lambda name: details.stored_graph(_run(name))))
    routes.get(f"{run}/log")(answers(lambda name: details.log_tail(_run(name))))
    routes.get(f"{run}/samples/{{file}}")(answers(_sample, query=("side",)))
    for action in ("pause", "stop", "save", "lr"):
        ask = functools.partial(_ask, action=action)
        routes.post(f"{run}/{action}")(answers(ask, body=True, threads=_patient))
    routes.post(f"{run}/delete")(answers(_delete, body=True, threads=_patient))
    routes.get(f"{PREFIX}/trained")(answers(lambda: {"prompts": called_off.prompts(), "ending": bridge.ending()}))
    routes.post(f"{PREFIX}/prompts/{{key}}/end")(answers(lambda key, body: {"ended": bridge.cancel(key)}, body=True))
    routes.post(f"{PREFIX}/datasets")(answers(_begin_upload, body=True))
    routes.put(f"{PREFIX}/datasets/{{key}}")(answers(_receive))
    routes.post(f"{PREFIX}/datasets/{{key}}/finish")(answers(_finish_upload))
    routes.delete(f"{PREFIX}/datasets/{{key}}")(answers(_drop_upload))


def _register_with_comfyui() -> None:
    try:
        from server import PromptServer
    except ImportError:
        return  # no ComfyUI around: unit tests and tools
    if getattr(PromptServer, "instance", None) is not None:
        register(PromptServer.instance.routes)
        keep_fresh(PromptServer.instance.app)


_register_with_comfyui()

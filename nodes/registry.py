"""What this ComfyUI process remembers of runs: one connection each, links of Start, and what the cache must not forget.

State lives here because a node's class is a locked clone while it executes, and its output may be evicted any time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..trainer.config import check_name
from ..trainer.data.cache import Cache
from ..trainer.data.manifest import cache_root, check_manifest, entries
from ..trainer.flux.variants import FileInfo
from ..trainer.memory import machine
from ..trainer.memory import plan as planning
from ..trainer.run import RunDirectory
from ..trainer.runs import find_runs, identity
from . import bridge
from .handles import ModelHandle, RunHandle

if TYPE_CHECKING:
    from ..trainer.client import WorkerClient

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_lock = threading.Lock()
IDLE = ("paused", "finished", "failed")
"""States in which a worker that lives does nothing."""
_clients: dict[str, WorkerClient] = {}
"""By the run's uid: a run that was deleted and made anew is another one."""
_models: dict[str, ModelHandle] = {}


@dataclass
class _Known:
    identity: str
    generation: int = 0


_known: dict[Path, _Known] = {}


# -- runs ----------------------------------------------------------------------------------------------------------


def open_directory(handle: RunHandle) -> RunDirectory:
    """The directory of a handle's run. ``ValueError`` if it is gone, or another run took its name."""
    try:
        run = RunDirectory(bridge.run_dir(handle.name))
    except ValueError as error:
        raise ValueError(f"run {handle.name!r} cannot be opened ({error}): queue the graph again to start it "
                         f"anew") from None
    if run.uid != handle.uid:
        raise ValueError(f"run {handle.name!r} is another one than when this graph last ran: queue it again")
    return run


def require_step(run: RunDirectory, step: int, why: str) -> None:
    """Raise ``ValueError`` unless the run's weights are those of ``step``. ``why``: what that prevents."""
    now = run.status()["resume_step"]
    if now != step:
        raise ValueError(f"run {run.name!r} is at step {now} and this node stands for step {step}; {why}: "
                         "connect it to the last Train Steps of the run, or to Open a Run")


def generation(name: str) -> int:
    """Goes up when a run of this name, or ``name_2`` and so on, is rolled back or deleted; never by training.

    Part of Start's fingerprint: the cache of ComfyUI must hold when nothing but training happened, and let go when
    steps were taken back.
    """
    try:
        path = bridge.home() / check_name(name)
    except ValueError:
        return 0
    with _lock:
        numbered = [p for p in _known if p.name.startswith(f"{name}_") and p.name[len(name) + 1 :].isdigit()]
    return sum(note_identity(p) for p in (path, *numbered))


def note_identity(path: Path) -> int:
    """Remember which run lies at ``path``; how often a run there was rolled back or deleted."""
    now = identity(path)
    with _lock:
        known = _known.setdefault(path, _Known(now))
        if known.identity != now:
            known.generation += known.identity != NO_RUN
            known.identity = now
        return known.generation


def renew(run: RunDirectory) -> None:
    """Have Start run again when the graph is queued next: something went wrong that it may put right."""
    note_identity(run.path)
    with _lock:
        _known[run.path].generation += 1


def renew_moments(run: RunDirectory) -> int:
    """Have the run go on from the weights it has now with the optimizer's moments at zero; returns its step.

    A worker that has it saves first, and goes.
    """
    from ..trainer.client import open_run

    def stop() -> None:
        if run.locked():
            with open_run(run.path, launch=False, check=check_wanted) as its_worker:
                its_worker.stop()

    cancellable(stop)
    return run.renew_moments()


def require_data(run: RunDirectory) -> None:
    """Raise ``ValueError`` unless the cached latents and captions that the run is trained on are there."""
    try:
        manifest = run.dataset
        check_manifest(manifest)
        cache = Cache(cache_root(manifest, run.path))
        gone = sum(not cache.path(kind, key).exists() for kind, key in entries(manifest))
        if gone:
            raise ValueError(f"{gone} cached latents and captions are gone from {cache.root}")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"run {run.name!r} cannot be trained: {error}; queue the graph again, its Start makes them "
                         "anew") from None


NO_RUN = "none"
"""What ``trainer.runs.identity`` says where there is no run."""


def remember_model(uid: str, model: ModelHandle) -> None:
    """Keep the model handle of a run, whose CLIP and VAE may have come over links."""
    _models[uid] = model


def model_of(run: RunDirectory) -> ModelHandle:
    """The files and links that a run's prompts and pictures are encoded with."""
    return _models.get(run.uid) or ModelHandle(config=run.config.model)


def flux_of(run: RunDirectory) -> FileInfo:
    """What Flux a run trains. Its file is needed only where nothing was trained yet."""
    try:
        return run.flux(resumed=run.source() is not None)
    except ValueError:
        return run.flux(resumed=True)  # it may be in memory, unsaved


# -- workers -------------------------------------------------------------------------------------------------------


def client(name: str, say: Callable[[str], None] = log.info) -> WorkerClient:
    """This process's connection to the run's worker, which is launched where there is none. May take minutes.

    The worker lives for this process: when ComfyUI goes away it finishes its step, saves and exits. ``say`` is told
    what is waited for.
    """
    from ..trainer.client import open_run

    run = RunDirectory(bridge.run_dir(name))
    with _lock:
        found = _clients.get(run.uid)
    if found is not None and found.alive():
        return found
    _make_room(run)
    check_wanted()
    opened = found or open_run(run.path, launch=True, owner=True, say=say, check=check_wanted)
    opened.open()
    with _lock:
        _clients[run.uid] = opened
    _hang_up_at_the_end()
    return opened


@functools.cache
def _hang_up_at_the_end() -> None:
    """Have the workers save as soon as ComfyUI begins to end, on Ctrl-C: its process may live on for some seconds."""

    def hang_up() -> None:
        threading.main_thread().join()
        for one in tuple(_clients.values()):
            one.hang_up()

    threading.Thread(target=hang_up, name="flux-fft-end", daemon=True).start()


def _make_room(run: RunDirectory) -> None:
    """Have idle workers of other runs save and exit if the run's own would not fit into RAM beside them.

    Whoever started them: a run that failed, or that another server or a terminal left idle, holds as much memory.
    """
    from ..trainer.client import open_run

    home = bridge.home()
    others = [r for r in find_runs(home) if r.uid != run.uid and r.worker_alive()] if home.is_dir() else []
    if not others:
        return
    shapes = [tuple(sample["shape"]) for sample in run.dataset["samples"]]
    needed = planning.resolve(run.config, flux_of(run), shapes).ram_gb
    for other in others:
        if machine.free_ram() / planning.GIB >= needed:
            return
        if other.status()["state"] not in IDLE:
            continue
        log.info("run %s saves and leaves the memory, which run %s needs", other.name, run.name)
        try:
            with open_run(other.path, launch=False, check=check_wanted) as its_worker:
                its_worker.stop()
        except (ValueError, OSError, RuntimeError) as error:  # it cannot save, say: its memory is not to be had
            log.warning("run %s keeps its memory: %s", other.name, error)


def park(run: RunDirectory) -> None:
    """Have the run's worker give back its VRAM, unless it trains: pictures are to be decoded now."""
    with _lock:
        found = _clients.get(run.uid)
    if found is None or not found.alive():
        return
    try:
        if cancellable(found.status, since=1 << 53)["state"] not in ("training", "preparing"):
            cancellable(found.park)
    except Exception as error:  # it may have died, which whoever needs it next is told
        if bridge.ends_prompt(error):
            raise
        log.warning("run %s did not give back its VRAM: %s", run.name, error)


class Abandoned(Exception):
    """Whoever waited for this has given up."""


LINGER = 1.0
"""Seconds that a cancelled wait gives its thread to notice: what it asks for after that would come too late."""
_wait = threading.local()


@contextlib.contextmanager
def ended_by(check: Callable[[], None]) -> Iterator[None]:
    """Inside the block every wait of this thread asks ``check`` too, which may raise what is to end it."""
    before = getattr(_wait, "check", None)

    def both() -> None:
        if before is not None:
            before()
        check()

    _wait.check = both
    try:
        yield
    finally:
        _wait.check = before


@contextlib.contextmanager
def ended_by_cancel_alone() -> Iterator[None]:
    """Inside the block what ``ended_by`` has this thread ask is not asked: it has been heard."""
    before = getattr(_wait, "check", None)
    _wait.check = None
    try:
        yield
    finally:
        _wait.check = before


def check_wanted() -> None:
    """Raise ``Abandoned`` in a thread of ``cancellable`` whose caller has given up: it must start nothing any more."""
    given_up, check = getattr(_wait, "given_up", None), getattr(_wait, "check", None)
    if given_up is not None and given_up.is_set():
        raise Abandoned
    if check is not None:
        check()


def cancellable(function: Callable[..., _T], *args: Any, seconds: float = math.inf,
                meanwhile: Callable[[], None] | None = None, **kwargs: Any) -> _T:
    """``function(*args)`` in a thread of its own, while this one (the executor's) stays open for the user's Cancel.

    On Cancel ComfyUI's interrupt is raised, and the thread gives up where it next asks ``check_wanted``. So it does
    after ``seconds``, which raises ``TimeoutError``, and with what ``ended_by`` raises. ``meanwhile`` is called on
    this thread, twice a second or so.
    """
    bridge.throw_if_cancelled()  # many short calls in a row must hear it too
    check_wanted()
    outcome: list[tuple[bool, Any]] = []
    given_up, check = threading.Event(), getattr(_wait, "check", None)

    def work() -> None:
        _wait.given_up, _wait.check = given_up, check
        try:
            outcome.append((True, function(*args, **kwargs)))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=work, name="flux-fft-wait", daemon=True)
    deadline = time.monotonic() + seconds
    thread.start()
    due = time.monotonic() + 0.2
    try:
        while True:
            thread.join(0.05)
            if not thread.is_alive():
                break
            bridge.throw_if_cancelled()
            if time.monotonic() > due:
                check_wanted()
                if meanwhile is not None:
                    meanwhile()
                due = time.monotonic() + 0.5
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:.0f} s")
    except BaseException:
        given_up.set()
        thread.join(LINGER)
        raise
    good, value = outcome[0]
    if good:
        return value
    raise value

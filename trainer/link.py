"""The way to a run's worker: found or started, asked over connections that may break, missed when it has gone."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from . import files, launch, protocol
from .protocol import Message, WorkerClosing, WorkerError
from .run import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

START_SECONDS = 10.0
"""After so long without an answer the user is told that it is waited for."""

ATTEMPTS = 3
"""Connections over which one request is tried, while the worker lives."""


class WorkerDied(RuntimeError):
    """The worker is gone without having said so."""


class WorkerLink:
    """Asks one run's worker, from any thread; each request has a connection of its own while it is answered."""

    def __init__(self, run: RunDirectory, *, may_launch: bool, owner: bool, idle_exit: float | None,
                 say: Callable[[str], None], check: Callable[[], None]) -> None:
        self.run = run
        self._check = check
        self._may_launch, self._owner, self._idle_exit, self._say = may_launch, owner, idle_exit, say
        self._address: tuple[int, bytes] | None = None
        self._free: list[Connection] = []
        self._owner_connection: Connection | None = None
        self._child: launch.Child | None = None
        self._lock = threading.RLock()
        self._opening = threading.Lock()

    def alive(self) -> bool:
        """Whether a worker has the run open."""
        return self.run.worker_alive()

    def close(self) -> None:
        """Say goodbye. The worker goes on with what it does; its idle rules end it."""
        with self._lock:
            mine, self._free = self._free, []
            owner, self._owner_connection = self._owner_connection, None
        with contextlib.suppress(OSError, EOFError):
            if owner is not None:
                _exchange(owner, {"op": "goodbye"}, {})
        for connection in (*mine, owner):
            if connection is not None:
                connection.close()

    def hang_up(self) -> None:
        """Let go as a process does that ends: a worker that lives for this client finishes its step, saves and exits.
        """
        self._forget()

    # -- how it is asked

    def _ask_live(self, op: str, **fields: Any) -> Any:
        return self._live({"op": op, **fields}, {})[0]

    def _live(self, request: dict[str, Any], tensors: Mapping[str, Tensor]) -> Message:
        """Ask a living worker: one that is exiting, or did so in good order, is waited for and started again."""
        for _ in range(5):
            try:
                self.open()
                self._check()  # whoever gave up meanwhile wants nothing done any more
                return self._ask(request, tensors)
            except WorkerClosing:
                if not self._may_launch:
                    raise
                self._say(f"the worker of run {self.run.name!r} is saving: waiting for it to end")
                self._outlast()
        raise WorkerDied(f"the worker of run {self.run.name!r} keeps ending: worker.log in {self.run.path} says why")

    def _outlast(self) -> None:
        """Wait until the worker has ended, or takes requests again: the save that it would end with has failed."""
        with contextlib.suppress(WorkerClosing):
            while self._address is not None and self._read_address() == self._address:
                if not self._ask({"op": "hello"}, {})[0]["closing"]:
                    return
                self._check()
                time.sleep(0.1)

    def _ask_or(self, op: str, *, patient: bool, **fields: Any) -> Any:
        """Ask the worker if there is one, else return None. ``patient``: one that is starting is waited for."""
        while self._address is None:
            if self._opening.acquire(blocking=patient):
                try:
                    waited_for = "" if self._address else self._try_to_meet(launched=True)
                finally:
                    self._opening.release()
                if waited_for:  # it is exiting already
                    return None
            if self._address is None:
                if not (patient and self.run.locked()):
                    return None
                time.sleep(0.05)
        try:
            return self._ask({"op": op, **fields}, {})[0]
        except WorkerClosing:
            return None

    def _ask(self, request: dict[str, Any], tensors: Mapping[str, Tensor], attempts: int = ATTEMPTS) -> Message:
        with self._lock:
            address = self._address
            connection = self._free.pop() if self._free else None
        if address is None:
            raise WorkerClosing("the worker has ended")
        try:
            if connection is None:
                connection = protocol.connect(*address)
            header, reply = _exchange(connection, request, tensors)
        except (OSError, EOFError, AuthenticationError) as error:
            if connection is not None:
                connection.close()
            if not self._lives(address):
                raise self._gone() from error
            if attempts == 1:
                raise WorkerError(f"the worker of run {self.run.name!r} hangs up on every {request['op']!r}"
                                  f" ({error!r}): worker.log in {self.run.path} may say why") from error
            return self._ask(request, tensors, attempts - 1)
        with self._lock:
            if address == self._address:
                self._free.append(connection)
            else:
                connection.close()
        if "error" in header:
            protocol.raise_error(header["error"])
        return header["ok"], reply

    def _lives(self, address: tuple[int, bytes]) -> bool:
        """Whether a connection was all that broke. A dead worker's lock falls once the system has cleared it away."""
        self._wait_until_unlocked(1.5)
        return self._read_address() == address

    def _gone(self) -> Exception:
        """Why the worker no longer answers."""
        # The exit code comes when the lock falls.
        killed = self._child.wait(0.5) if self._child is not None else None
        self._forget()
        if self.run.worker_alive() or launch.ended_in_order(self.run.log_file):
            return WorkerClosing("the worker has ended")
        return WorkerDied(launch.obituary(self.run, killed))

    def _forget(self) -> None:
        """Let go of a worker that is no more: to one that lives, its owner's connection would seem cut."""
        with self._lock:
            stale, self._free, self._address = self._free, [], None
            owner, self._owner_connection = self._owner_connection, None
        for connection in (*stale, owner):
            if connection is not None:
                connection.close()

    # -- how it is found

    def open(self) -> None:
        """Find the worker, or start it, and wait until it answers."""
        with self._opening:
            self._forget_the_dead()
            said, child, patience = "", None, time.monotonic() + START_SECONDS
            try:
                while self._address is None:
                    waited_for = self._try_to_meet(child is not None)
                    if waited_for is None:
                        return
                    if not self.run.locked():
                        self._check()
                        child = self._start(child)
                    elif not waited_for and time.monotonic() > patience:
                        waited_for = f"another process has run {self.run.name!r} open: waiting for it to end"
                    if waited_for and waited_for != said:
                        self._say(said := waited_for)
                    self._check()
                    time.sleep(0.05)
            except BaseException:
                if child is not None and not self.run.locked():  # given up before it has loaded anything
                    child.end()
                raise

    def _forget_the_dead(self) -> None:
        if self._address is not None and self._read_address() != self._address:
            if not launch.ended_in_order(self.run.log_file) and not self.run.locked():
                self._say(launch.obituary(self.run, self._child.wait(0.5) if self._child is not None else None))
            self._forget()

    def _start(self, child: launch.Child | None) -> launch.Child:
        """The worker process that was started, or a new one: where there is none, or it came second."""
        if not self._may_launch:
            raise ValueError(f"run {self.run.name!r} has no worker: it is not open")
        code = child.poll() if child is not None else None
        if child is None or code == launch.EXIT_LOCKED:
            child = self._child = launch.start(self.run, self._idle_exit)
        elif code is not None:
            raise WorkerDied(launch.obituary(self.run, code))
        return child

    def _try_to_meet(self, launched: bool) -> str | None:
        """None if a worker took us on; else what is being waited for (empty: its start)."""
        address = self._read_address()
        if address is None:
            return ""
        try:
            connection = protocol.connect(*address)
        except (OSError, EOFError, AuthenticationError):
            return ""  # it is starting, or just gone: the lock tells which
        keep = False
        try:
            hello = _exchange(connection, {"op": "hello", "owner": self._owner}, {})[0]["ok"]
            if hello["version"] != protocol.VERSION:
                _exchange(connection, {"op": "stop"}, {})
                return f"a worker of another version has run {self.run.name!r} open: waiting for it to save and end"
            if hello["closing"] or (hello["failed"] and not launched):
                return f"the worker of run {self.run.name!r} is saving: waiting for it to end"
            with self._lock:
                self._address = address
                if self._owner:
                    self._owner_connection = connection
                else:
                    self._free.append(connection)
            keep = True
            return None
        except (OSError, EOFError):
            return ""
        finally:
            if not keep:
                with contextlib.suppress(OSError, EOFError):
                    _exchange(connection, {"op": "goodbye"}, {})
                connection.close()

    def _read_address(self) -> tuple[int, bytes] | None:
        if not self.run.worker_alive():
            return None
        try:
            address = files.read_json(self.run.address_file)
            return int(address["port"]), bytes.fromhex(address["key"])
        except (ValueError, KeyError):
            return None

    def _wait_until_unlocked(self, seconds: float = 3600.0) -> None:
        deadline = time.monotonic() + seconds
        while self.run.locked() and time.monotonic() < deadline:
            time.sleep(0.02)


def _exchange(connection: Connection, request: dict[str, Any], tensors: Mapping[str, Tensor]) -> Message:
    connection.send_bytes(protocol.encode(request, tensors))
    return protocol.decode(connection.recv_bytes(protocol.MAX_BYTES))

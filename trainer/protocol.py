"""Messages between a worker and its clients, and the worker's ear.

One message is ``[u32 length of the header][header: JSON][tensors: a safetensors file, or nothing]``, carried by
``multiprocessing.connection`` over loopback. A client proves that it knows the key in ``worker.json`` (readable by
the user alone), and the worker likewise, before anything is read. Nothing is ever unpickled.

Each request gets one answer on its connection: ``{"ok": ...}`` or ``{"error": {"type", "message"}}``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

VERSION = 2
"""Goes up when a message changes its meaning. ``hello`` and ``stop`` stay as they are for ever."""
MAX_BYTES = 1 << 30
"""No message is longer: latents and captions are megabytes, weights never travel."""
HANDSHAKE_SECONDS = 10.0
ON_THE_WAY = 60.0
"""Seconds without work for which a run rests on its way, for a client's pictures, before another has it go on."""

Message = tuple[dict[str, Any], dict[str, "Tensor"]]


class RunMovedOn(ValueError):
    """A prediction was asked of a step that the run has left."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @classmethod
    def between(cls, wanted: int, now: int) -> RunMovedOn:
        """The error of a handle made at step ``wanted`` while the run is at ``now``."""
        return cls(
            f"the run is at step {now} and this handle is of step {wanted}: connect the sampler's output to the `after`"
            " input of the next Train Steps, so that it samples before training goes on"
        )


class WorkerClosing(RuntimeError):
    """The worker is about to exit and takes no more work."""


class WorkerError(RuntimeError):
    """Something that is not the user's fault went wrong in the worker; ``worker.log`` has the traceback."""


_ERRORS: dict[str, type[Exception]] = {
    "RunMovedOn": RunMovedOn, "WorkerClosing": WorkerClosing, "ValueError": ValueError, "OSError": OSError,
}


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """One message. Tensors may have any dtype and shape; they arrive on the CPU."""
    text = json.dumps(header).encode()
    payload = b""
    if tensors:
        from safetensors.torch import save

        # Copies: safetensors refuses tensors that share memory, as views of one batch do.
        payload = save({name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()})
    return b"".join((struct.pack("<I", len(text)), text, payload))


def decode(data: bytes) -> Message:
    """Header and tensors of a message. ``ValueError`` if it is none."""
    if len(data) < 4 or (start := 4 + struct.unpack_from("<I", data)[0]) > len(data):
        raise ValueError(f"a message of {len(data)} bytes is cut short")
    header = json.loads(data[4:start])
    if not isinstance(header, dict):
        raise ValueError("a message has no header")
    if start == len(data):
        return header, {}
    from safetensors.torch import load

    return header, load(data[start:])


def error_header(error: BaseException) -> dict[str, Any]:
    """How an exception travels: users' errors as what they are, all others as ``WorkerError``."""
    kind = next((name for name, cls in _ERRORS.items() if isinstance(error, cls)), "WorkerError")
    message = str(error) if kind != "WorkerError" else f"{type(error).__name__}: {error}"
    return {"error": {"type": kind, "message": " ".join(message.split())}}


def raise_error(error: Mapping[str, Any]) -> NoReturn:
    """Raise what ``error_header`` described."""
    raise _ERRORS.get(error.get("type", ""), WorkerError)(error.get("message", "no message"))


def connect(port: int, key: bytes) -> Connection:
    """An authenticated connection. ``OSError`` or ``AuthenticationError`` if no worker with this key answers there."""
    connection = Client(("127.0.0.1", port))
    try:
        # The port may be another program's by now, one that waits for us to speak.
        if not connection.poll(HANDSHAKE_SECONDS):
            raise OSError(f"port {port} does not answer")
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException as error:
        connection.close()
        if isinstance(error, EOFError | AssertionError | ValueError):  # what a foreign greeting causes in there
            raise AuthenticationError(f"port {port} is no worker's") from error
        raise
    return connection  # type: ignore[return-value]


class Peer:
    """One connected client, as the worker sees it."""

    def __init__(self) -> None:
        self.owner = False
        """Whether the worker lives for this client: see ``Server``."""
        self.farewell = False
        """Whether it has said goodbye."""


Handler = Callable[[Peer, dict[str, Any], dict[str, "Tensor"]], Message]


class Server:
    """Listens on loopback and answers each connection in a thread of its own.

    ``handle(peer, request, tensors)`` gives the answer or raises; ``lost(peer)`` is told when a connection ends.
    """

    def __init__(self, handle: Handler, lost: Callable[[Peer], None]) -> None:
        self.key = secrets.token_bytes(32)
        self._handle, self._lost = handle, lost
        self._listener = Listener(("127.0.0.1", 0), backlog=16)
        self.port: int = self._listener.address[1]  # type: ignore[assignment]
        """Where it listens."""
        self._open = True
        self._busy = 0
        self._idle = threading.Condition()
        self._thread("accept", self._accept)

    def close(self, seconds: float) -> None:
        """Take no more connections; wait at most so long for answers that are being made or sent."""
        self._open = False
        with self._idle:
            self._idle.wait_for(lambda: self._busy == 0, seconds)
        with contextlib.suppress(OSError):  # closing alone would not wake the thread that accepts
            Client(("127.0.0.1", self.port)).close()
        self._listener.close()

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, name=f"worker-{name}", daemon=True).start()

    def _accept(self) -> None:
        while self._open:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if self._open:
                    log.warning("a connection failed: %s", error)
                    time.sleep(0.1)
                continue
            if not self._open:
                return connection.close()
            # The handshake waits for the other side, so it is not done here: a silent one would deafen the worker.
            self._thread("connection", self._converse, connection)

    def _converse(self, connection: Connection) -> None:
        peer = Peer()
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            while not peer.farewell:
                data = connection.recv_bytes(MAX_BYTES)
                with self._idle:
                    self._busy += 1
                try:
                    connection.send_bytes(self._answer(peer, data))
                finally:
                    with self._idle:
                        self._busy -= 1
                        self._idle.notify_all()
        except (EOFError, OSError, AuthenticationError, AssertionError, ValueError) as error:
            log.debug("a connection ended: %r", error)
        finally:
            connection.close()
            self._lost(peer)

    def _answer(self, peer: Peer, data: bytes) -> bytes:
        try:
            return encode(*self._handle(peer, *decode(data)))
        except Exception as error:
            # A client must not wait for an answer that never comes, whatever went wrong.
            header = error_header(error)
            if header["error"]["type"] == "WorkerError":
                log.exception("a request failed")
            return encode(header)

"""What clients may ask of a worker: requests in, calls of the worker's methods, answers out."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..export.write import ExportOptions
from ..protocol import VERSION, Message, Peer
from ..settings import from_dict

if TYPE_CHECKING:
    from torch import Tensor

    from ..worker import Worker


class Service:
    """Answers the requests to one worker, and keeps an eye on the client that it lives for."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._owners = 0
        self._cancelled = False
        """Whether the export under way is not wanted any more."""
        self._lock = threading.Lock()

    def handle(self, peer: Peer, request: dict[str, Any], tensors: Mapping[str, Tensor]) -> Message:
        """The answer to one request: ``{"op": name, ...}``. ``ValueError`` for what is none."""
        answer = getattr(self, f"_on_{request.get('op')}", None)
        if answer is None:
            raise ValueError(f"the worker knows no request {request.get('op')!r}")
        result = answer(peer, request, tensors)
        return result if isinstance(result, tuple) else ({"ok": result}, {})

    def lost(self, peer: Peer) -> None:
        """A connection has ended. If it was the last owner's, and no goodbye was said, ComfyUI is gone."""
        with self._lock:
            if not peer.owner:
                return
            self._owners -= 1
            last = self._owners == 0
        if last and not peer.farewell and not self._worker.foreground:
            self._worker.quit("the program that started it is gone")

    def _on_hello(self, peer: Peer, request: dict[str, Any], _: Any) -> dict[str, Any]:
        worker = self._worker
        with self._lock:
            if request.get("owner") and not peer.owner:
                peer.owner = True
                self._owners += 1
        return {"version": VERSION, "uid": worker.run.uid, "closing": worker.closing,
                "failed": worker.failure is not None}

    def _on_goodbye(self, peer: Peer, *_: Any) -> None:
        peer.farewell = True

    def _on_status(self, _: Peer, request: dict[str, Any], __: Any) -> dict[str, Any]:
        return self._worker.status(request.get("since", 0), request.get("wait", 0.0))

    def _on_train(self, _: Peer, request: dict[str, Any], __: Any) -> None:
        self._worker.train(request["until"], request.get("pause_at"))

    def _on_pause(self, _: Peer, request: dict[str, Any], __: Any) -> None:
        self._worker.pause(request.get("wait", True))

    def _on_park(self, *_: Any) -> None:
        self._worker.park()

    def _on_stop(self, *_: Any) -> None:
        self._worker.stop()

    def _on_save(self, *_: Any) -> int:
        return self._worker.do(lambda session: session.save())

    def _on_set_lr(self, _: Peer, request: dict[str, Any], __: Any) -> None:
        self._worker.do(lambda session: session.set_lr(request["lr"]))

    def _on_roll_back(self, _: Peer, request: dict[str, Any], __: Any) -> int:
        return self._worker.roll_back(request.get("step"), bool(request.get("fresh")))

    def _on_predict(self, _: Peer, request: dict[str, Any], tensors: Mapping[str, Tensor]) -> Message:
        step, ema = request.get("step"), bool(request.get("ema"))
        return {"ok": None}, {"velocity": self._worker.do(lambda session: session.predict(tensors, step, ema=ema))}

    def _on_evaluate(self, *_: Any) -> dict[str, Any]:
        return self._worker.do(lambda session: session.evaluate())

    def _on_export(self, _: Peer, request: dict[str, Any], __: Any) -> dict[str, Any]:
        options, worker = from_dict(ExportOptions, request["options"], "export"), self._worker
        self._cancelled = False
        return worker.do(lambda session: session.export(request["path"], options,
                                                        lambda: self._cancelled or worker.closing))

    def _on_cancel_export(self, *_: Any) -> None:
        self._cancelled = True

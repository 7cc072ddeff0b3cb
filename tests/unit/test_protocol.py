"""Messages: what goes in comes out, strangers are kept out, and one bad client spoils nothing."""

import json
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener

import pytest
import torch

from trainer import protocol
from trainer.protocol import RunMovedOn, Server, WorkerClosing, WorkerError, decode, encode


def test_header_and_tensors_come_back():
    batch = torch.randn(2, 3, 4)
    tensors = {
        "x": batch[0], "y": batch[1].T, "half": batch.bfloat16(), "scalar": torch.tensor(1.5),
        "none": torch.empty(0, 4), "twice": batch,
    }
    header, found = decode(encode({"op": "predict", "name": "\u00e4", "step": None}, tensors))
    assert header == {"op": "predict", "name": "\u00e4", "step": None}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert decode(encode({})) == ({}, {})


def test_tensors_made_under_inference_mode_travel():
    with torch.inference_mode():
        x = torch.randn(3)
        data = encode({}, {"x": x})
    assert torch.equal(decode(data)[1]["x"], x)


@pytest.mark.parametrize("data", [b"", b"abc", struct.pack("<I", 9) + b"{}", struct.pack("<I", 2) + b"[]",
                                  struct.pack("<I", 2) + b"{x", struct.pack("<I", 2) + b"\xff\xff"])
def test_what_is_no_message_is_a_value_error(data):
    with pytest.raises(ValueError):
        decode(data)


@pytest.mark.parametrize(("error", "expected"), [
    (ValueError("lr\nis bad"), ValueError), (RunMovedOn.between(3, 5), RunMovedOn),
    (WorkerClosing("soon"), WorkerClosing), (OSError("disk"), OSError), (KeyError("x"), WorkerError),
    (RuntimeError("cuda"), WorkerError),
])
def test_errors_travel_as_what_they_are_in_one_line(error, expected):
    header = json.loads(json.dumps(protocol.error_header(error)))
    with pytest.raises(expected) as caught:
        protocol.raise_error(header["error"])
    assert type(caught.value) is expected and "\n" not in str(caught.value)


def test_the_error_of_a_run_that_moved_on_says_what_to_do():
    text = str(RunMovedOn.between(500, 520))
    assert "step 520" in text and "step 500" in text and "`after` input of the next Train Steps" in text


@pytest.fixture
def server():
    lost = []

    def handle(peer, request, tensors):
        if request["op"] == "echo":
            return {"ok": request["text"]}, tensors
        if request["op"] == "sleep":
            time.sleep(request["seconds"])
            return {"ok": None}, {}
        if request["op"] == "bye":
            peer.farewell = True
            return {"ok": None}, {}
        raise ValueError("no such thing")

    server = Server(handle, lost.append)
    server.lost = lost
    yield server
    server.close(0)


def ask(connection, **request):
    connection.send_bytes(encode(request))
    return decode(connection.recv_bytes())[0]


def test_requests_are_answered_and_a_failing_one_ends_nothing(server):
    connection = protocol.connect(server.port, server.key)
    assert ask(connection, op="echo", text="a") == {"ok": "a"}
    assert ask(connection, op="what") == {"error": {"type": "ValueError", "message": "no such thing"}}
    assert ask(connection, text="no op")["error"]["type"] == "WorkerError"
    connection.send_bytes(b"garbage")
    assert decode(connection.recv_bytes())[0]["error"]["type"] == "ValueError"
    assert ask(connection, op="echo", text="b") == {"ok": "b"}
    assert ask(connection, op="bye") == {"ok": None}
    with pytest.raises(EOFError):
        connection.recv_bytes()


def test_a_long_request_keeps_no_other_connection_waiting(server):
    slow, fast = (protocol.connect(server.port, server.key) for _ in range(2))
    slow.send_bytes(encode({"op": "sleep", "seconds": 2.0}))
    started = time.monotonic()
    assert ask(fast, op="echo", text="now") == {"ok": "now"}
    assert time.monotonic() - started < 1.0


def test_without_the_key_nothing_is_read(server):
    with pytest.raises(AuthenticationError):
        protocol.connect(server.port, b"guess")
    silent = Client(("127.0.0.1", server.port))  # connects and says nothing: others must be heard all the same
    browser = socket.create_connection(("127.0.0.1", server.port))
    browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    unasked = Client(("127.0.0.1", server.port))
    unasked.send_bytes(encode({"op": "echo", "text": "let me in"}))
    assert ask(protocol.connect(server.port, server.key), op="echo", text="x") == {"ok": "x"}
    assert unasked.recv_bytes(256)  # the challenge
    unasked.close(), silent.close(), browser.close()


def test_an_oversized_message_ends_its_connection_only(server, monkeypatch):
    connection = protocol.connect(server.port, server.key)
    assert ask(connection, op="echo", text="")
    monkeypatch.setattr(protocol, "MAX_BYTES", 1000)
    other = protocol.connect(server.port, server.key)
    with pytest.raises((EOFError, OSError)):
        ask(other, op="echo", text="x" * 2000)
        ask(other, op="echo", text="still there?")
    assert ask(protocol.connect(server.port, server.key), op="echo", text="x") == {"ok": "x"}


def test_another_program_on_the_port_is_no_worker(monkeypatch):
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.2)
    mute = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(OSError, match="does not answer"):
        protocol.connect(mute.getsockname()[1], b"key")
    chatty = Listener(("127.0.0.1", 0))
    threading.Thread(target=lambda: chatty.accept().send_bytes(b"220 ready"), daemon=True).start()
    with pytest.raises((AuthenticationError, OSError)):
        protocol.connect(chatty.address[1], b"key")
    mute.close(), chatty.close()
    with pytest.raises(OSError):
        protocol.connect(mute_port := 1, b"key")
    assert mute_port


def test_the_end_of_a_connection_is_told(server):
    connection = protocol.connect(server.port, server.key)
    ask(connection, op="echo", text="")
    assert not server.lost
    connection.close()
    deadline = time.monotonic() + 5
    while not server.lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(server.lost) == 1


def test_closing_waits_for_answers_that_are_on_their_way(server):
    connection = protocol.connect(server.port, server.key)
    connection.send_bytes(encode({"op": "sleep", "seconds": 0.5}))
    time.sleep(0.1)
    server.close(5.0)
    assert connection.poll(0.5) and decode(connection.recv_bytes())[0] == {"ok": None}
    with pytest.raises(OSError):
        protocol.connect(server.port, server.key)

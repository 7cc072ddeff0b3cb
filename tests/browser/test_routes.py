"""The pack's routes as anybody on the network may call them, and how its files are served."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message

import pytest

from tests.browser.conftest import NEIGHBOUR
from tests.browser.runs import long_run
from tests.comfyui.server import PACK_NAME, Server


def test_routes_refuse_what_is_not_there(server: Server) -> None:
    def status(path: str, method: str = "GET", body: bytes = b"", kind: str = "application/json") -> int:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{server.port}/flux_fft{path}", body or None,
                                             {"Content-Type": kind}, method=method)
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            line = json.load(error)["error"]
            assert line and "\n" not in line and error.code in (400, 404, 409)
            return error.code

    assert status("/runs") == 200
    assert status("/runs/missing/losses?first=1&last=2") == 404
    for what in ("", "/details", "/prompt", "/graph", "/log", "/samples/a.png"):
        assert status(f"/runs/missing{what}") == 404, what
        assert status(f"/runs/%2e%2e{what}") == 400, what
        assert status(f"/runs/..%2f..%2fuser{what}") == 400, what
    for action in ("pause", "stop", "save", "lr", "delete"):
        assert status(f"/runs/missing/{action}", "POST") == 404, action
        assert status(f"/runs/%2e%2e/{action}", "POST", b"{}") == 400, action
        assert status(f"/runs/missing/{action}", "POST", b"[1") == 400, action
        assert status(f"/runs/missing/{action}", "POST", b"{}", "text/plain") == 400, "any web page may send that"
    assert status("/datasets", "POST", b"no json") == 400
    for method, end in (("PUT", "?path=a.png"), ("POST", "/finish"), ("DELETE", "")):
        assert status(f"/datasets/0123456789abcdef{end}", method) == 404
    began = server.post("/flux_fft/datasets", {"name": "../x"})
    assert began["name"] == ".. x" or "/" not in began["name"]
    assert status(f"/datasets/{began['id']}?path=..%2fa.png", "PUT", b"x") == 400
    assert status(f"/datasets/{began['id']}/finish", "POST") == 404, "a refusal ended it"
    began = server.post("/flux_fft/datasets", {"name": "empty"})
    assert status(f"/datasets/{began['id']}/finish", "POST") == 400
    assert not [p for p in (server.base / "input").iterdir() if "dataset-" in p.name]


def _headers(server: Server, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Message]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


@pytest.mark.parametrize("file", ["main.js", "store.mjs", "docs/FluxFFTStart.md", "docs/pictures/FluxFFTStart.png"])
def test_browsers_ask_whether_a_file_of_the_pack_is_still_the_same(server: Server, file: str) -> None:
    path = f"/extensions/{PACK_NAME}/{file}"
    status, headers = _headers(server, path)
    assert status == 200 and headers["Cache-Control"] == "no-cache"
    status, again = _headers(server, path, {"If-None-Match": headers["ETag"]})
    assert status == 304 and again["Cache-Control"] == "no-cache", "what is unchanged is not sent again"
    assert _headers(server, path, {"If-None-Match": '"another"'})[0] == 200


def test_files_and_answers_of_others_are_served_as_they_were(server: Server) -> None:
    for path in (f"/extensions/{NEIGHBOUR}/theirs.mjs", "/object_info/KSampler", "/queue", "/flux_fft/runs"):
        status, headers = _headers(server, path)
        assert status == 200 and "Cache-Control" not in headers, path
    assert "max-age" in _headers(server, "/no/such/picture.png")[1]["Cache-Control"], "ComfyUI's own choice"


def test_a_part_of_a_curve_is_given_and_wrong_questions_are_told_in_a_line(server: Server) -> None:
    long_run(server, "parts", 3000)
    assert [b[4] for b in server.get("/flux_fft/runs/parts")["losses"]] == [2] * 1500
    part = server.get("/flux_fft/runs/parts/losses?first=1000&last=1099")
    assert part["run"] == "parts" and [(b[0], b[4]) for b in part["losses"]] == [(s, 1) for s in range(1000, 1100)]
    for query in ("", "?first=1", "?last=5", "?first=a&last=5", "?first=-1&last=5", "?first=1.5&last=2",
                  "?first=9&last=5", "?first=1&last=" + "9" * 5000, "?first=%D9%A1&last=5"):
        request = f"http://127.0.0.1:{server.port}/flux_fft/runs/parts/losses{query}"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        line = json.load(refused.value)["error"]
        assert refused.value.code == 400 and "\n" not in line and len(line) < 200, query
        assert "first" in line or "last" in line, query

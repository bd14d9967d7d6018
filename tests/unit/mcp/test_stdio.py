"""What a client's own session has to do with an answer, as `fumehood mcp` reads it."""

from __future__ import annotations

import json
import socket
import threading
import time
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import pytest

from fumehood.core.envelope import Envelope
from fumehood.mcp.server import stdio
from fumehood.mcp.server.dispatch import result_of
from fumehood.mcp.server.messages import encode_result
from fumehood.mcp.server.stdio import Bridge, is_without_session
from support.answers import envelope_bytes

pytestmark = pytest.mark.row("D3")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a bridge needs more than its second for the last answers."""
    monkeypatch.setattr(stdio, "LAST_ANSWERS_S", 20)


OVER = {"code": "RESOURCE_NOT_FOUND", "message": "The session has ended."}


def answer(data: Any = None, error: dict[str, Any] | None = None) -> bytes:
    document = json.loads(envelope_bytes({})) | {"data": data or {}, "success": error is None}
    document["status"] = "success" if error is None else "error"
    document["error"] = error and {"retryable": False, "human_review": False, **error}
    result = result_of(Envelope.model_validate(document))
    return encode_result(7, json.dumps(result).encode())


ENDED = {**OVER, "fields": ["session_id"]}


@pytest.mark.parametrize(
    ("text", "is_over"),
    [
        (answer(error=ENDED), True),
        (answer({"value": ENDED}), False),
        (answer(error={**OVER, "fields": ["paths"], "details": {"fields": ["session_id"]}}), False),
        (answer(error={**OVER, "details": {"error": ENDED}}), False),
        (answer(error={**ENDED, "code": "EXECUTION_ERROR"}), False),
        (answer({"code": "RESOURCE_NOT_FOUND", "deep": json.loads("[" * 64 + "]" * 64)}), False),
        (b'{"jsonrpc":"2.0","id":7,"error":{"code":-32602}}', False),
        (b'{"jsonrpc":"2.0","id":7,"result":null}', False),
        (b'{"jsonrpc":"2.0","id":7,"result":{"_meta":[]}}', False),
        (b'{"jsonrpc":"2.0","id":7,"result":{"_meta":{"fumehood/envelope":{"error":7}}}}', False),
        (b'{"jsonrpc":"2.0","id":7,"res', False),
    ],
    ids=[
        "ended session", "value of a program", "missing file", "details", "another code", "deep",
        "JSON-RPC error", "null", "list", "number", "cut off",
    ],
)  # fmt: skip
def test_only_the_refusal_of_an_ended_session_is_recognized(text: bytes, is_over: bool) -> None:
    assert is_without_session(text) is is_over


@pytest.mark.parametrize(
    "head",
    [b"content-length: " + b"9" * 40, b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40],
    ids=["length", "chunk"],
)
def test_request_is_answered_even_if_the_daemon_sends_garbage(
    tmp_path: Path, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "LAST_ANSWERS_S", 120.0)

    def answers() -> None:
        with listener.accept()[0] as other:
            other.recv(1 << 16)
            other.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        threading.Thread(target=answers, daemon=True).start()
        request = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}\n'
        with FileIO(tmp_path / "out", "w") as writing:
            Bridge(tmp_path / "s", {}, False, BytesIO(request), writing).run()
    said = json.loads((tmp_path / "out").read_bytes())
    assert (said["id"], said["error"]["code"]) == (7, -32603)


class SlowStream(FileIO):
    """A stream to a client that reads late."""

    def write(self, message: object) -> int:
        time.sleep(0.3)
        return super().write(message)  # type: ignore[arg-type]


def test_process_does_not_end_before_its_last_answer_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "LAST_ANSWERS_S", 120.0)
    request = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}\n'
    with SlowStream(tmp_path / "out", "w") as writing:
        Bridge(tmp_path / "no engine", {}, False, BytesIO(request), writing).run()
        assert json.loads((tmp_path / "out").read_bytes())["id"] == 7


def test_call_does_not_wait_forever_for_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "API_S", 0.05)
    monkeypatch.setattr(stdio, "LAST_ANSWERS_S", 120.0)
    request = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}\n'
    with socket.socket(socket.AF_UNIX) as listener, FileIO(tmp_path / "out", "w") as writing:
        listener.bind(str(tmp_path / "s"))
        listener.listen()  # and it never says a word
        bridge = Bridge(tmp_path / "s", {}, True, BytesIO(request), writing)
        bridge.run()
        bridge.close()
        for kept in bridge._idle:
            kept.close()
    assert json.loads((tmp_path / "out").read_bytes())["result"]["isError"]

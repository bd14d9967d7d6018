"""A program's calls arrive by a stream whose guest is hostile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fumehood.code_mode.stream import CallStream
from fumehood.protocol.framing import FrameError
from fumehood.protocol.streams import MESSAGE_PIECE_BYTES, Joiner


class Port:
    """Keeps the answers."""

    dial = None

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, body: bytes) -> None:
        self.sent.append(body)

    def pause(self, *, is_paused: bool) -> None:
        raise AssertionError

    def refuse(self, why: str) -> None:
        raise AssertionError


class Callee:
    """Keeps the calls, and the way back."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, Any]] = []
        self.port = Port()
        self.stream = CallStream(self.on_call, self.port)

    def on_call(self, number: int, tool: str, arguments: Any, answer: Any, clock: Any) -> None:
        assert clock is self.port
        self.calls.append((number, tool, arguments))
        self.answer = answer


def call(number: Any = 1, **fields: Any) -> bytes:
    return json.dumps({"number": number, "tool": "t", "arguments": {}} | fields).encode()


@pytest.mark.row("B3")
def test_call_is_answered_in_pieces() -> None:
    callee, joiner = Callee(), Joiner()
    callee.stream.on_frame(call(7, arguments={"a": 1}))
    assert callee.calls == [(7, "t", {"a": 1})]
    callee.answer(b'{"call":7}')
    (piece,) = callee.port.sent
    assert joiner.add(piece) == b'{"call":7}'
    callee.answer(b"x" * (2 * MESSAGE_PIECE_BYTES + 1))
    pieces = callee.port.sent[1:]
    assert [len(one) - 1 for one in pieces] == [MESSAGE_PIECE_BYTES, MESSAGE_PIECE_BYTES, 1]
    assert [joiner.add(one) for one in pieces] == [None, None, b"x" * (2 * MESSAGE_PIECE_BYTES + 1)]


INVALID = {
    "negative-number": call(-1),
    "huge-number": call(1 << 40),
    "text-as-number": call("1"),
    "true-as-number": call(True),
    "overlong-name": call(tool="x" * 300),
    "list-of-arguments": call(arguments=[]),
    "extra-field": call(more=1),
    "no-tool": b'{"number":1,"arguments":{}}',
    "two-tools": b'{"number":1,"tool":"a","tool":"b","arguments":{}}',
    "not-json": b"{",
    "no-object": b"[]",
    "nan": b'{"number":1,"tool":"t","arguments":{"a":NaN}}',
    "too-deep": b'{"number":1,"tool":"t","arguments":' + b'{"a":' * 90 + b"1" + b"}" * 91,
    "empty": b"",
}


@pytest.mark.row("B3")
@pytest.mark.parametrize("name", INVALID)
def test_attack_invalid_call_is_refused_and_reaches_no_tool(name: str) -> None:
    callee = Callee()
    for _ in range(2):
        with pytest.raises(FrameError):
            callee.stream.on_frame(INVALID[name])
        callee.stream.close()  # checked also after the end
    assert callee.calls == []


@pytest.mark.row("B3", "P8")
def test_call_after_the_end_of_the_stream_is_dropped() -> None:
    callee = Callee()
    callee.stream.close()
    callee.stream.on_frame(call())
    assert callee.calls == []

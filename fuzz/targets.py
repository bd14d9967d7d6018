"""What is fuzzed: each target takes bytes that an attacker may send, and fails if a promise about
them does not hold.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import h11

from fumehood.core.errors import InvalidParams
from fumehood.gateway.proxy import MAX_HEAD_BYTES
from fumehood.gateway.request import ProgramRequest, Refusal, read_request
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import PolicyError
from fumehood.protocol import framing, strict_json
from fumehood.protocol.connections import Segment
from fumehood.protocol.container_frames import parse_container_body
from fumehood.protocol.cursors import Cursors
from fumehood.streams import sse

CURSORS = Cursors(b"k" * 32)


def pieces(data: bytes) -> Iterator[bytes]:
    """Cut data at places that follow from it."""
    chance = random.Random(data)  # noqa: S311  # repeatable
    at = 0
    while at < len(data):
        size = chance.randint(1, 64)
        yield data[at : at + size]
        at += size


def frames(data: bytes) -> None:
    """A stream is decoded alike however it is cut, into frames of the protocol or an error."""

    def decoded(chunks: Iterator[bytes]) -> list[str]:
        decoder = framing.Decoder(4096)
        found = []
        try:
            for chunk in chunks:
                found += [repr(one) for one in decoder.feed(chunk)]
        except framing.FrameError:
            found.append("error")
        return found

    whole, cut = decoded(iter([data])), decoded(pieces(data))
    # With one chunk, an error loses the messages before it.
    assert whole == cut or (whole == ["error"] and cut[-1] == "error"), (whole, cut)
    for parse in (parse_container_body, Segment.parse):
        with suppress(framing.FrameError):
            parse(data)


def strict(data: bytes) -> None:
    """What strict JSON accepts means the same to Python's own parser, and survives a round trip."""
    try:
        value = strict_json.loads(data)
    except strict_json.StrictJsonError:
        return
    assert repr(json.loads(data)) == repr(value)
    assert repr(strict_json.loads(strict_json.dumps(value))) == repr(value)


def policy(data: bytes) -> None:
    """A policy file is a policy, or has faults."""
    for name in ("policy.toml", "policy.yaml", "policy.json"):
        with suppress(PolicyError):
            parse_policy(name, data, [])


def events(data: bytes) -> None:
    """A stream of events is decoded alike however it is cut; no cursor but ours is one."""

    def decoded(chunks: Iterator[bytes]) -> list[object]:
        decoder = sse.Decoder()
        found: list[object] = []
        try:
            for chunk in chunks:
                found += decoder.feed(chunk)
        except sse.SseError:
            found.append("error")
        return found

    whole, cut = decoded(iter([data])), decoded(pieces(data))
    assert whole == cut or (whole == ["error"] and cut[-1] == "error"), (whole, cut)
    try:
        CURSORS.read(data.decode("utf-8", "replace"), "calls", "uid:1")
    except InvalidParams:
        return
    raise AssertionError("a cursor that nobody made was accepted")


def gateway(data: bytes) -> None:
    """A request of a program goes to the place that its `Host` header and target name, or is
    refused.
    """
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        parser.receive_data(data)
        event = parser.next_event()
    except h11.RemoteProtocolError:
        return
    if not isinstance(event, h11.Request):
        return
    try:
        request = read_request(event.method, event.target, event.headers.raw_items(), None)
    except Refusal:
        return
    _require_clear(request)


def _require_clear(request: ProgramRequest) -> None:
    place = request.place
    assert place.host
    assert place.host == place.host.lower()
    assert 0 < place.port < 65_536
    assert request.target.startswith("/") or request.target == "*"
    assert not set(request.url) & set(" \r\n\t#"), request.url
    names = {name.lower() for name, _ in request.headers}
    assert not names & {b"host", b"connection", b"transfer-encoding", b"proxy-authorization"}
    assert all(b"\r" not in value and b"\n" not in value for _, value in request.headers)


_TOML = b"""\
[[rules]]
id = "a"
decision = "ask"
tools = ["t"]
[[rules.when]]
argument = "/x"
glob = "*y"
"""
_FRAME = {"op": "output", "id": 1, "stream": "stdout", "text": "x"}
_GET = b"GET http://example.com:8080/a?b HTTP/1.1\r\nHost: example.com:8080\r\n\r\n"
_POST = b"POST http://[::1]/x HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 3\r\n\r\nabc"

TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "frames": (frames, [framing.encode(_FRAME)]),
    "strict_json": (strict, [b'{"a": [1, 2.5e3, "\\u00e4", null, true]}']),
    "policy": (policy, [_TOML, b"rules:\n- id: a\n  decision: deny\n  tools: [t]\n"]),
    "events": (events, [sse.encode("tool_output", "1:2", b'{"text":"x"}')]),
    "gateway": (gateway, [_GET, _POST]),
}
"""Name → the target, and inputs to begin with."""

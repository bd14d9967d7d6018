"""The socket's boundary: invalid HTTP, JSON or calls, and clients that disconnect.

Each gets its documented code in an envelope, never a stack trace, and the daemon survives.
"""

from __future__ import annotations

import json
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.health import Health
from support.http import SocketClient, connect, read_to_end, split_answer
from support.wait import DEADLINE_S

CALL = "/v1/tools/calculator/call"
GOOD = b'{"arguments": {"expression": "2 + 2"}}'
KEYS = ["success", "status", "data", "error", "metadata"]
LEAKS = re.compile(rb"Traceback|File \"|/site-packages|\.py\b|/root|/home")


@dataclass(frozen=True)
class Body:
    """A request body, how it must end, and the nearest body that is served."""

    name: str
    body: bytes
    code: str
    status: int
    twin: bytes = GOOD
    fields: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return self.name


def arguments(raw: str) -> bytes:
    return f'{{"arguments": {raw}}}'.encode()


def expression(raw: str) -> bytes:
    return arguments(f'{{"expression": {raw}}}')


BODIES = [
    Body("empty", b"", "INVALID_PARAMS", 400),
    Body("malformed", b'{"arguments": ', "INVALID_PARAMS", 400),
    Body("trailing", GOOD + b"x", "INVALID_PARAMS", 400, GOOD + b" \n"),
    Body("not-an-object", b"[1]", "INVALID_PARAMS", 400),
    Body("null", b"null", "INVALID_PARAMS", 400),
    Body("byte-order-marks", b"\xef\xbb\xbf" * 2 + GOOD, "INVALID_PARAMS", 400,
         b"\xef\xbb\xbf" + GOOD),
    Body("utf-16", GOOD.decode().encode("utf-16"), "INVALID_PARAMS", 400),
    Body("latin-1", expression('"1 + \u00e9"').decode().encode("latin-1"), "INVALID_PARAMS", 400),
    Body("nan", expression("NaN"), "INVALID_PARAMS", 400),
    Body("infinity", arguments('{"expression": "1", "precision": Infinity}'), "INVALID_PARAMS", 400),
    Body("number-beyond-doubles", arguments('{"expression": "1", "precision": 1e999}'),
         "INVALID_PARAMS", 400, arguments('{"expression": "1", "precision": 1e0}')),
    Body("integer-of-4301-digits", arguments('{"expression": "1", "precision": ' + "9" * 4301 + "}"),
         "INVALID_PARAMS", 400),
    Body("lone-surrogate", expression(r'"1 + \ud800"'), "INVALID_PARAMS", 400),
    Body("lone-surrogate-in-key", arguments(r'{"expression": "1", "\udfff": 1}'),
         "INVALID_PARAMS", 400),
    Body("repeated-key", b'{"arguments": {"expression": "1"}, "arguments": {"expression": "2"}}',
         "INVALID_PARAMS", 400),
    Body("repeated-key-inside", arguments('{"expression": "1", "expression": "2"}'),
         "INVALID_PARAMS", 400),
    Body("repeated-key-escaped", arguments(r'{"expression": "1", "\u0065xpression": "2"}'),
         "INVALID_PARAMS", 400, arguments(r'{"\u0065xpression": "2"}')),
    Body("10000-levels", b"[" * 10_000 + b"]" * 10_000, "INVALID_PARAMS", 400),
    Body("10000-levels-of-objects", b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "INVALID_PARAMS", 400),
    Body("65-levels", arguments("[" * 64 + "]" * 64), "INVALID_PARAMS", 400),
    Body("nul-in-a-string", expression(r'"1\u0000 + 1"'), "INVALID_PARAMS", 400, GOOD,
         ("expression",)),
    Body("nul-byte", b'{"arguments": {"expression": "1\x00"}}', "INVALID_PARAMS", 400),
    Body("wrong-type", expression("12"), "INVALID_PARAMS", 400, GOOD, ("expression",)),
    Body("missing", arguments("{}"), "INVALID_PARAMS", 400, GOOD, ("expression",)),
    Body("extra", arguments('{"expression": "1", "secret": 1}'), "INVALID_PARAMS", 400, GOOD,
         ("secret",)),
    Body("several-at-once", arguments('{"precision": 99.5, "a": 1, "b": 2}'), "INVALID_PARAMS", 400,
         GOOD, ("expression", "a", "b", "precision")),
    Body("precision-is-text", arguments('{"expression": "1", "precision": "two"}'), "INVALID_PARAMS",
         400, arguments('{"expression": "1", "precision": "2"}'), ("precision",)),
    Body("too-long", expression('"' + "1" * 40_000 + '"'), "INVALID_PARAMS", 400, GOOD,
         ("expression",)),
    Body("arguments-are-a-list", arguments("[]"), "INVALID_PARAMS", 400, GOOD, ("arguments",)),
    Body("unknown-key", b'{"arguments": {"expression": "1"}, "admin": true}', "INVALID_PARAMS", 400,
         GOOD, ("admin",)),
    Body("unknown-option", b'{"arguments": {"expression": "1"}, "options": {"sudo": true}}',
         "INVALID_PARAMS", 400, GOOD, ("options.sudo",)),
    Body("timeout-zero", b'{"arguments": {"expression": "1"}, "options": {"timeout_seconds": 0}}',
         "INVALID_PARAMS", 400, GOOD, ("options.timeout_seconds",)),
    Body("timeout-negative", b'{"arguments": {"expression": "1"}, "options": {"timeout_seconds": -1}}',
         "INVALID_PARAMS", 400, GOOD, ("options.timeout_seconds",)),
    Body("timeout-true", b'{"arguments": {"expression": "1"}, "options": {"timeout_seconds": true}}',
         "INVALID_PARAMS", 400, GOOD, ("options.timeout_seconds",)),
    Body("memory-below-minimum",
         b'{"arguments": {"expression": "1"}, "options": {"memory_limit_mb": 1}}',
         "INVALID_PARAMS", 400,
         b'{"arguments": {"expression": "1"}, "options": {"memory_limit_mb": 16}}',
         ("options.memory_limit_mb",)),
    Body("debug-is-text", b'{"arguments": {"expression": "1"}, "options": {"debug": "yes"}}',
         "INVALID_PARAMS", 400, GOOD, ("options.debug",)),
    Body("trace-id-with-line-break",
         rb'{"arguments": {"expression": "1"}, "options": {"trace_id": "a\nb"}}',
         "INVALID_PARAMS", 400,
         b'{"arguments": {"expression": "1"}, "options": {"trace_id": "a.b-c"}}',
         ("options.trace_id",)),
    *[
        Body(f"not-enforced-{name}",
             json.dumps({"arguments": {"expression": "1"}, "options": {name: value}}).encode(),
             "INVALID_PARAMS", 400, GOOD, (f"options.{name}",))
        for name, value in {
            "max_length": 0,
            "isolation": "session",
        }.items()
    ],
    *[
        Body(f"idempotency-key-{name}",
             json.dumps({"arguments": {"expression": "1"},
                         "options": {"idempotency_key": value}}).encode(),
             "INVALID_PARAMS", 400,
             json.dumps({"arguments": {"expression": "1"},
                         "options": {"idempotency_key": "k" * 255}}).encode(),
             ("options.idempotency_key",))
        for name, value in {"empty": "", "too-long": "k" * 256, "number": 1, "list": ["k"]}.items()
    ],
    Body("unknown-session",
         b'{"arguments": {"expression": "1"}, "options": {"session_id": "s"}}',
         "RESOURCE_NOT_FOUND", 404, GOOD),
    Body("10-mb", expression('"' + "1" * 10_000_000 + '"'), "REQUEST_TOO_LARGE", 413),
    Body("10-mb-of-objects", b'{"a":' * 2_000_000, "REQUEST_TOO_LARGE", 413),
]  # fmt: skip


@pytest.mark.row("D1", "E1", "P2")
@pytest.mark.parametrize("case", BODIES, ids=str)
def test_invalid_body_gets_its_documented_code_and_its_twin_is_served(
    case: Body, client: SocketClient
) -> None:
    answer = client.post(CALL, case.body)
    assert (answer.code, answer.status) == (case.code, case.status), answer.body["error"]
    assert list(answer.body) == KEYS
    if case.fields is not None:
        assert sorted(answer.body["error"]["fields"]) == sorted(case.fields)
    assert not LEAKS.search(json.dumps(answer.body).encode())
    assert len(json.dumps(answer.body)) < 5000
    twin = client.post(CALL, case.twin)
    assert twin.code is None, twin.body["error"]


REQUESTS = [
    ("GET", CALL, None, "METHOD_NOT_ALLOWED", 405),
    ("DELETE", "/v1/tools/calculator", None, "METHOD_NOT_ALLOWED", 405),
    ("POST", "/v1/tools", "application/json", "METHOD_NOT_ALLOWED", 405),
    ("GET", "/", None, "RESOURCE_NOT_FOUND", 404),
    ("POST", "/v1/approvals", "application/json", "METHOD_NOT_ALLOWED", 405),
    ("POST", "/v1/approvals/apr_1/decision", "application/json", "RESOURCE_NOT_FOUND", 404),
    ("GET", "/v1/tools/", None, "RESOURCE_NOT_FOUND", 404),
    ("GET", "/v1/../../etc/passwd", None, "RESOURCE_NOT_FOUND", 404),
    ("POST", "/v1/tools/calculator/watch", "application/json", "RESOURCE_NOT_FOUND", 404),
    ("GET", "/v1/tools/nothing", None, "TOOL_NOT_FOUND", 404),
    ("GET", "/v1/tools/calculator@9.9.9", None, "TOOL_NOT_FOUND", 404),
    ("POST", "/v1/tools/nothing/call", "application/json", "TOOL_NOT_FOUND", 404),
    ("POST", "/v1/tools/%00/call", "application/json", "TOOL_NOT_FOUND", 404),
    ("POST", "/v1/tools/%ff%fe/call", "application/json", "TOOL_NOT_FOUND", 404),
    ("POST", "/v1/tools/" + "a" * 5000 + "/call", "application/json", "TOOL_NOT_FOUND", 404),
    ("POST", CALL, "text/plain", "UNSUPPORTED_MEDIA_TYPE", 415),
    ("POST", CALL, "application/json; charset=latin-1", "UNSUPPORTED_MEDIA_TYPE", 415),
    ("POST", CALL, "application/x-www-form-urlencoded", "UNSUPPORTED_MEDIA_TYPE", 415),
    ("POST", CALL, None, "UNSUPPORTED_MEDIA_TYPE", 415),
]


@pytest.mark.row("D1", "E1")
@pytest.mark.parametrize(("method", "path", "kind", "code", "status"), REQUESTS)
def test_invalid_request_gets_its_documented_code(
    client: SocketClient, method: str, path: str, kind: str | None, code: str, status: int
) -> None:
    body = GOOD if method == "POST" else None
    answer = client.request(method, path, body, {"content-type": kind} if kind else {})
    assert (answer.code, answer.status) == (code, status)
    assert list(answer.body) == KEYS
    assert client.calculate("1 + 1").body["success"]


def request_bytes(body: bytes = GOOD, *extra: str) -> bytes:
    head = [f"POST {CALL} HTTP/1.1", "host: x", "content-type: application/json", *extra]
    return "\r\n".join([*head, "", ""]).encode() + body


RAW = [
    ("not-http", b"hello\r\n\r\n", 400),
    ("tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, 400),
    ("bad-length", request_bytes(GOOD, "content-length: many"), 400),
    ("two-lengths", request_bytes(GOOD, "content-length: 3", f"content-length: {len(GOOD)}"), 400),
    ("negative-length", request_bytes(GOOD, "content-length: -1"), 400),
    ("header-without-end", b"GET /v1/health HTTP/1.1\r\nx: " + b"a" * 200_000, 400),
    ("header-injection", b"GET /v1/health HTTP/1.1\r\nhost: x\r\na\x00b: c\r\n\r\n", 400),
    ("bad-chunk", request_bytes(b"zz\r\n", "transfer-encoding: chunked"), 400),
]

HEADERS = [
    (["content-type: application/json"], 415),
    (["content-type: text/plain"], 415),
    (["content-encoding: gzip"], 415),
    (["content-encoding: identity"], 200),
]


@pytest.mark.row("D1", "E1")
@pytest.mark.parametrize(("extra", "status"), HEADERS)
def test_duplicate_content_type_or_encoding_is_refused(
    shared_daemon, extra: list[str], status: int
) -> None:
    with connect(shared_daemon.socket) as connection:
        connection.sendall(request_bytes(GOOD, f"content-length: {len(GOOD)}", *extra))
        connection.shutdown(socket.SHUT_WR)
        answer = split_answer(read_to_end(connection))
    assert answer.status == status
    assert answer.code == ("UNSUPPORTED_MEDIA_TYPE" if status == 415 else None)


@pytest.mark.row("D1")
def test_body_split_at_any_byte_is_reassembled(shared_daemon) -> None:
    """A complete body and one that is still arriving are read by different code."""
    for cut in range(len(GOOD)):
        with connect(shared_daemon.socket) as connection:
            connection.sendall(request_bytes(GOOD[:cut], f"content-length: {len(GOOD)}"))
            time.sleep(0.005)
            connection.sendall(GOOD[cut:])
            connection.shutdown(socket.SHUT_WR)
            answer = split_answer(read_to_end(connection))
        assert answer.body["data"] == {"value": 4, "text": "4"}


@pytest.mark.row("D1", "E1")
@pytest.mark.parametrize(("name", "raw", "status"), RAW, ids=[row[0] for row in RAW])
def test_invalid_http_gets_an_error_envelope(
    shared_daemon, client: SocketClient, name: str, raw: bytes, status: int
) -> None:
    with connect(shared_daemon.socket) as connection:
        with suppress(BrokenPipeError):  # the answer may come before everything is sent
            connection.sendall(raw)
        answer = split_answer(read_to_end(connection))
    assert answer.status == status
    assert list(answer.body) == KEYS
    assert answer.code == "INVALID_PARAMS"
    assert client.calculate("1 + 1").body["success"]


@pytest.mark.row("D1")
def test_half_closed_connection_gets_its_answer(shared_daemon) -> None:
    with connect(shared_daemon.socket) as connection:
        connection.sendall(request_bytes(GOOD, f"content-length: {len(GOOD)}"))
        connection.shutdown(socket.SHUT_WR)
        answer = split_answer(read_to_end(connection))
    assert answer.body["data"] == {"value": 4, "text": "4"}


@pytest.mark.row("D1", "E1")
@pytest.mark.parametrize("sent", [0, 1, 20])
def test_truncated_body_is_refused(shared_daemon, sent: int) -> None:
    with connect(shared_daemon.socket) as connection:
        connection.sendall(request_bytes(GOOD[:sent], f"content-length: {len(GOOD)}"))
        connection.shutdown(socket.SHUT_WR)
        answer = split_answer(read_to_end(connection))
    assert (answer.status, answer.code) == (400, "INVALID_PARAMS")


@pytest.mark.row("D1", "E1")
def test_truncated_request_line_is_refused(shared_daemon) -> None:
    with connect(shared_daemon.socket) as connection:
        connection.sendall(b"POST /v1/tools/calc")
        connection.shutdown(socket.SHUT_WR)
        answer = split_answer(read_to_end(connection))
    assert (answer.status, answer.code) == (400, "INVALID_PARAMS")


@pytest.mark.row("D1")
def test_client_disconnect_mid_request_does_not_affect_others(shared_daemon, client) -> None:
    whole = request_bytes(GOOD, f"content-length: {len(GOOD)}")
    for cut in (0, 10, len(whole) // 2, len(whole) - 1, len(whole)):
        for _ in range(5):
            with connect(shared_daemon.socket) as connection:
                connection.sendall(whole[:cut])
    assert client.calculate("1 + 1").body["success"]


@pytest.mark.row("D1")
def test_500_connections_at_once_are_all_served(shared_daemon, health: Health) -> None:
    health.expect_connections(500)
    everybody = threading.Barrier(500)
    answers: list[dict] = []

    def call() -> None:
        client = SocketClient(shared_daemon.socket)
        everybody.wait(timeout=DEADLINE_S)
        answers.append(client.calculate("2 + 2").body)
        client.close()

    threads = [threading.Thread(target=call) for _ in range(500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    assert len(answers) == 500
    assert all(answer["data"] == {"value": 4, "text": "4"} for answer in answers)
    assert len({answer["metadata"]["call_id"] for answer in answers}) == 500


@pytest.mark.row("D1")
def test_pipelined_requests_are_answered_in_order(shared_daemon) -> None:
    bodies = [f'{{"arguments": {{"expression": "{n}"}}}}'.encode() for n in range(5)]
    with connect(shared_daemon.socket) as connection:
        for body in bodies[:-1]:
            connection.sendall(request_bytes(body, f"content-length: {len(body)}"))
        last = request_bytes(bodies[-1], f"content-length: {len(bodies[-1])}", "connection: close")
        connection.sendall(last)
        raw = read_to_end(connection)
    values = [int(value) for value in re.findall(rb'"data":\{"value":(\d+)', raw)]
    assert values == [0, 1, 2, 3, 4]


SLOW = json.dumps({
    "arguments": {"code": "n = 0\nwhile n < 300000:\n    n = n + 1\nn"},
    "options": {"cancel_on_disconnect": True},  # so that the end of what is sent is noticed
}).encode()  # fmt: skip
RUN = "/v1/tools/run_restricted_python/call"


@pytest.mark.row("D1")
@pytest.mark.parametrize("cut", [0, 10, 3])
def test_half_closed_connection_gets_answers_to_all_pipelined_requests(
    shared_daemon, cut: int
) -> None:
    """A request received during a running one is also answered, because it would run anyway."""
    length = f"content-length: {len(GOOD)}"
    first = request_bytes(SLOW, f"content-length: {len(SLOW)}").replace(CALL.encode(), RUN.encode())
    second = request_bytes(GOOD, length)
    with connect(shared_daemon.socket) as connection:
        connection.sendall(first + (second[:-cut] if cut else second))
        connection.shutdown(socket.SHUT_WR)
        raw = read_to_end(connection)
    one, two = re.findall(rb"HTTP/1.1 (\d+).*?\r\n\r\n(\{.*?\})(?=HTTP|$)", raw, re.DOTALL)
    assert (one[0], json.loads(one[1])["data"]["value"]) == (b"200", 300000)
    if cut:
        assert (two[0], json.loads(two[1])["error"]["code"]) == (b"400", "INVALID_PARAMS")
    else:
        assert (two[0], json.loads(two[1])["data"]["value"]) == (b"200", 4)


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.row("D1")
@pytest.mark.parametrize("size", [len(GOOD), 100_000, 300_000])
@pytest.mark.parametrize("pause_s", [0.0, 0.2], ids=["pipelined", "sequential"])
def test_trace_id_does_not_leak_into_next_request_of_connection(
    shared_daemon, size: int, pause_s: float
) -> None:
    """A reverse proxy sends requests of several clients through one kept connection."""
    traced = f"traceparent: 00-{TRACE}-b7ad6b7169203331-01"
    padded = GOOD + b" " * (size - len(GOOD))
    first = request_bytes(padded, f"content-length: {size}", traced)
    second = request_bytes(GOOD, f"content-length: {len(GOOD)}")
    third = request_bytes(GOOD, f"content-length: {len(GOOD)}", traced, "connection: close")
    with connect(shared_daemon.socket) as connection:
        for request in (first, second, third):
            connection.sendall(request)
            time.sleep(pause_s)
        raw = read_to_end(connection)
    ids = [found.decode() for found in re.findall(rb'"trace_id":"([^"]*)"', raw)]
    assert (ids[0], ids[2]) == (TRACE, TRACE)
    assert ids[1].startswith("trace_")


@pytest.mark.row("D4")
@pytest.mark.needs("root")
def test_another_user_cannot_connect_and_is_unauthorized_if_it_could(shared_daemon) -> None:
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        f"sys.exit(s.connect_ex({str(shared_daemon.socket)!r}))"
    )
    refused = subprocess.run([sys.executable, "-c", program], timeout=600)
    assert refused.returncode == 13  # EACCES
    # Control: with the directory opened on purpose, the peer's uid still makes him nobody.
    shared_daemon.home.chmod(0o711)
    shared_daemon.socket.chmod(0o666)
    try:
        program = (
            "import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
            f"s.connect({str(shared_daemon.socket)!r})\n"
            f"s.sendall({request_bytes(GOOD, f'content-length: {len(GOOD)}', 'connection: close')!r})\n"
            "print(b''.join(iter(lambda: s.recv(9999), b'')).decode())"
        )
        answer = subprocess.run(
            [sys.executable, "-c", program], timeout=600, capture_output=True, check=True
        )
        assert b"UNAUTHORIZED" in answer.stdout
        assert b'"value":4' not in answer.stdout
    finally:
        shared_daemon.socket.chmod(0o600)
        shared_daemon.home.chmod(0o700)


@pytest.mark.row("D1", "D4")
def test_socket_and_its_directory_are_private(shared_daemon) -> None:
    assert stat.S_IMODE(shared_daemon.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(shared_daemon.home.stat().st_mode) == 0o700
    assert shared_daemon.socket.is_socket()


@pytest.mark.row("E1")
def test_log_contains_no_argument_values_or_internal_errors(start_daemon, home: Path) -> None:
    daemon = start_daemon()
    client = daemon.client()
    canary = "123454321 * 987656789"
    assert client.calculate(canary).body["success"]
    assert client.call("calculator", {"expression": "1", canary: 1}).code == "INVALID_PARAMS"
    client.close()
    assert daemon.stop() == 0
    assert "123454321" not in daemon.log
    assert "internal_error" not in daemon.log
    events = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    ended = [event for event in events if event["event"] == "call.ended"]
    assert [event["code"] for event in ended] == ["OK", "INVALID_PARAMS"]
    assert all(event["trace_id"] and event["call_id"] for event in ended)


@pytest.mark.row("D5")
def test_debug_log_has_one_event_per_stage_with_trace_and_call_id(start_daemon) -> None:
    daemon = start_daemon(log_level="debug")
    client = daemon.client()
    answer = client.calculate("1 + 1", trace_id="trace-of-my-own").body
    client.close()
    assert daemon.stop() == 0
    events = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    mine = [e for e in events if e.get("trace_id") == "trace-of-my-own"]
    stages = [
        "resolve",
        "validate",
        "authorize",
        "claim",
        "approve",
        "admit",
        "intent",
        "execute",
        "ended",
    ]
    assert [event["event"] for event in mine] == [f"call.{stage}" for stage in stages]
    assert {event["call_id"] for event in mine} == {answer["metadata"]["call_id"]}

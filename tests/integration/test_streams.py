"""Streams over a real socket: events, slow readers, disconnects, cancellation, shutdown."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client, Refused
from fumehood.streams.events import ErrorEvent
from support.answers import error_of
from support.clients import KINDS, client_of
from support.container import told
from support.scripted_daemon import running_scripted_daemon
from support.streaming import RawStream, call_id_of, streaming
from support.wait import DEADLINE_S, wait_until

pytestmark = pytest.mark.row("S8", "D2", "P8")

WAITS = {"code": told(tells=[["stdout", "so far"]], waits=True)}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # Nothing is kept here, so that nothing may be left; test_resumed_streams.py keeps events.
    with running_scripted_daemon(streams_kept_minutes="0") as running:
        yield running


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    with client_of(request.param, daemon.socket) as made:
        yield made


def program(**script: Any) -> dict[str, str]:
    return {"code": told(**script)}


def follow(daemon: Daemon, arguments: Any, **options: Any) -> Any:
    return streaming(daemon.socket, "run_python", arguments, **options)


def code_of(daemon: Daemon, call_id: str) -> str | None:
    """The call's code in the call log, RUNNING while it runs, or None if it is not known."""
    with Client(daemon.socket) as client:
        try:
            return client.call_record(call_id).code
        except Refused:
            return None


def spooled(daemon: Daemon) -> list[str]:
    return [path.name for path in (daemon.home / "spool").iterdir()]


def test_events_arrive_in_order_with_ids_and_end_with_the_whole_answer(daemon: Daemon) -> None:
    tells = [["stdout", "ä"], ["progress", 50, "half"], ["stderr", "e\r\n"], ["stdout", "b"]]
    with follow(daemon, program(tells=tells, value=4), trace_id="trace_mine") as stream:
        events = list(stream.events())
    assert stream.status == 200
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-store"
    said = [(event.kind, json.loads(event.data)) for event in events]
    call_id = call_id_of(events[0])
    for _, fields in said[:-1]:
        metadata = fields.pop("metadata")
        assert metadata.keys() == {"call_id", "trace_id", "timestamp"}
        assert (metadata["call_id"], metadata["trace_id"]) == (call_id, "trace_mine")
    assert said[:-1] == [
        ("tool_progress", {"progress": 0, "message": "started"}),
        ("tool_output", {"stream": "stdout", "offset": 0, "text": "ä"}),
        ("tool_progress", {"progress": 50, "message": "half"}),
        ("tool_output", {"stream": "stderr", "offset": 0, "text": "e\r\n"}),
        ("tool_output", {"stream": "stdout", "offset": 2, "text": "b"}),
    ]
    kind, envelope = said[-1]
    assert (kind, envelope["data"]["stdout"], envelope["data"]["value"]) == ("tool_result", "äb", 4)
    assert envelope["metadata"]["call_id"] == call_id
    places = [tuple(map(int, event.id.split(":"))) for event in events]
    assert [number for number, _ in places] == list(range(6))
    assert places == sorted(places)
    wait_until(lambda: not spooled(daemon))


@pytest.mark.parametrize(
    ("tool", "arguments", "headers", "status", "code"),
    [
        ("nothing", {}, "", 404, "TOOL_NOT_FOUND"),
        ("run_python", {"cod": ""}, "", 422, "INVALID_PARAMS"),
        ("run_python", WAITS, "Last-Event-ID: 3:400\r\n", 422, "INVALID_PARAMS"),
        ("run_python", WAITS, "authorization: Bearer fht_0_0\r\n", 401, "UNAUTHORIZED"),
    ],
)
def test_stream_refused_before_it_begins_is_an_envelope_with_its_http_status(
    daemon: Daemon, tool: str, arguments: Any, headers: str, status: int, code: str
) -> None:
    stream = RawStream(daemon.socket, tool, arguments, headers)
    assert stream.body()["error"]["code"] == code
    assert stream.status in (status, 400)
    stream.leave()


def test_slow_reader_loses_no_event_and_blocks_no_other_stream(daemon: Daemon) -> None:
    text = "0123456789ä🙂\n" * 1000
    with follow(daemon, program(tells=[["stdout", text, 60], ["stderr", text, 60]])) as slow:
        slow.begin()
        with follow(daemon, program(tells=[["stdout", text, 60]])) as quick:
            assert quick.data()[-1][0] == "tool_result"
        events = list(slow.events())
        # The call was over before most of it was read.
        assert code_of(daemon, call_id_of(events[0])) == "OK"
    told_texts = [json.loads(event.data)["text"] for event in events if event.kind == "tool_output"]
    assert "".join(told_texts) == text * 120
    wait_until(lambda: not spooled(daemon))


def test_cancelled_call_ends_its_stream_with_the_output_so_far(daemon: Daemon, client: Any) -> None:
    with follow(daemon, WAITS) as stream:
        events = stream.events()
        call_id = call_id_of(next(events))
        assert next(events).kind == "tool_output"
        assert client.cancel(call_id) is None
        last = next(events)
    answer = json.loads(last.data)
    assert (last.kind, answer["error"]["code"]) == ("tool_error", "CANCELLED")
    assert answer["error"]["details"]["stdout"] == "so far"
    assert answer["metadata"]["sandbox"]["ended_by"] == "cancelled"
    with pytest.raises(Refused) as refused:
        client.cancel(call_id)
    assert refused.value.code == "RESOURCE_NOT_FOUND"


def test_disconnected_reader_does_not_cancel_the_call_by_default(
    daemon: Daemon, client: Any
) -> None:
    with follow(daemon, WAITS) as stream:
        call_id = call_id_of(next(stream.events()))
    client.cancel(call_id)  # it was running still
    assert code_of(daemon, call_id) == "CANCELLED"
    wait_until(lambda: not spooled(daemon))


def test_cancel_on_disconnect_cancels_a_plain_call(daemon: Daemon) -> None:
    before = newest(daemon)
    body = json.dumps({"arguments": WAITS, "options": {"cancel_on_disconnect": True}}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(daemon.socket))
    connection.sendall(
        b"POST /v1/tools/run_python/call HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    connection.close()
    wait_until(lambda: newest(daemon) != before)
    assert newest(daemon)[1] == "CANCELLED"


def newest(daemon: Daemon) -> tuple[str, str]:
    with Client(daemon.socket) as client:
        items = client.calls(limit=1).items
        return (items[0].call_id, items[0].code) if items else ("", "")


def test_call_in_one_session_does_not_wait_for_another_session(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        busy, free = [client.create_session(memory_mb=128).id for _ in range(2)]
        with follow(daemon, WAITS, session_id=busy) as stream:
            call_id = call_id_of(next(stream.events()))
            assert client.call("run_python", program(value=1), session_id=free).success
            client.cancel(call_id)
        for session in (busy, free):
            client.end_session(session)


def test_half_closed_connection_still_receives_all_events(daemon: Daemon) -> None:
    """Twin: a half-closed connection is not a disconnect, even with cancel_on_disconnect."""
    with follow(daemon, WAITS, cancel_on_disconnect=True) as stream:
        stream.connection.shutdown(socket.SHUT_WR)
        events = stream.events()
        call_id = call_id_of(next(events))
        assert next(events).kind == "tool_output"
        with Client(daemon.socket) as client:
            client.cancel(call_id)
        assert next(events).kind == "tool_error"


def test_clients_yield_a_refusal_as_an_error_event(client: Any) -> None:
    (event,) = client.stream("nothing")
    assert isinstance(event, ErrorEvent)
    assert error_of(event.envelope).code == "TOOL_NOT_FOUND"
    with pytest.raises(ValueError, match="can be no name"):
        next(iter(client.stream("a/b")))


def test_closing_a_client_stream_closes_its_connection(daemon: Daemon, client: Any) -> None:
    events = client.stream("run_python", WAITS, cancel_on_disconnect=True)
    call_id = next(events).metadata.call_id
    events.close()
    wait_until(lambda: code_of(daemon, call_id) == "CANCELLED")


def test_stopping_engine_ends_a_stream_with_an_error_event() -> None:
    """An unread stream does not delay it."""
    text = "x" * 10_000
    script = program(tells=[["stdout", text, 90], ["stderr", text, 90]], waits=True)
    with running_scripted_daemon(drain_seconds="0.2") as own:
        with follow(own, WAITS) as stream, follow(own, script) as unread:
            unread.begin()
            events = stream.events()
            first, second = next(events), next(events)
            assert [first.kind, second.kind] == ["tool_progress", "tool_output"]
            own.process.send_signal(signal.SIGTERM)
            last = next(events)
            assert last.kind == "tool_error"
            answer = json.loads(last.data)
            assert answer["error"]["code"] in ("SHUTTING_DOWN", "CANCELLED")
            assert list(events) == []
            assert own.process.wait(timeout=DEADLINE_S) == 0
        # Who comes back later finds the same end.
        path = own.home / "spool" / call_id_of(first)
        kind, _, told_last = json.loads(path.read_bytes().splitlines()[-1])
        assert (kind, told_last["error"]["code"]) == ("tool_error", "SHUTTING_DOWN")

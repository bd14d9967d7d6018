"""Resumed event streams: no event lost or repeated, wherever the connection was cut."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import Daemon
from fumehood import Client, ControlClient, DaemonUnavailable
from fumehood.streams import resuming as rules
from fumehood.streams.events import ErrorEvent, OutputEvent, ResultEvent
from fumehood.streams.sse import Frame
from support.answers import code_of
from support.clients import KINDS, LEAVES_SOCKETS, client_of
from support.container import told
from support.cutting_proxy import cutting_proxy
from support.http import connect
from support.scripted_daemon import running_scripted_daemon
from support.streaming import call_id_of, resuming, streaming
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.row("D2"), *LEAVES_SOCKETS]

TELLS: list[list[Any]] = [
    ["stdout", "ä\r\n"],
    ["progress", 50, 'half\n["tool_output",1,{}]'],
    ["stderr", "\x1b[31m\u2028"],
    *([["stdout", f"{number:06}" + "x" * 40_000] for number in range(8)]),
    ["stdout", "data: 1\n\nid: 7:7\n\n"],
]


def program(**script: Any) -> dict[str, str]:
    return {"code": told(**script)}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_scripted_daemon(approver=True) as running:
        yield running


@pytest.fixture
def ended(daemon: Daemon) -> list[Frame]:
    """The events of a call that has ended."""
    with streaming(daemon.socket, "run_python", program(tells=TELLS, value=1)) as stream:
        return list(stream.events())


def rest_of(daemon: Daemon, call_id: str, after: str | None, by: str = "header") -> list[Frame]:
    with resuming(daemon.socket, call_id, after, by=by) as stream:
        frames = list(stream.events())
        assert stream.status == 200
    return frames


# -- cut at every event ----------------------------------------------------------------------


def test_ended_call_can_be_resumed_after_each_of_its_events(
    daemon: Daemon, ended: list[Frame]
) -> None:
    call_id = call_id_of(ended[0])
    assert rest_of(daemon, call_id, None) == ended
    for number, cut in enumerate(ended):
        assert rest_of(daemon, call_id, cut.id) == ended[number + 1 :]
    assert len(ended) == len(TELLS) + 2


def test_running_call_can_be_resumed_after_each_of_its_events(daemon: Daemon) -> None:
    with streaming(daemon.socket, "run_python", program(tells=TELLS, waits=True)) as uncut:
        events = uncut.events()
        seen = [next(events) for _ in range(len(TELLS) + 1)]
        call_id = call_id_of(seen[0])
        for number, cut in enumerate(seen):
            with resuming(daemon.socket, call_id, cut.id) as stream:
                resumed = stream.events()
                expected = seen[number + 1 :]
                assert [next(resumed) for _ in expected] == expected
        # The last of them waits for what is to come, as the first stream does.
        with resuming(daemon.socket, call_id, seen[-1].id) as waiting:
            assert waiting.begin() == 200
            reader = waiting.events()
            with Client(daemon.socket) as client:
                client.cancel(call_id)
            (last,) = list(reader)
        assert [last] == list(events)
        assert json.loads(last.data)["error"]["code"] == "CANCELLED"


def test_stream_sends_a_jittered_retry_delay_and_disables_buffering(
    daemon: Daemon, ended: list[Frame]
) -> None:
    pauses = set()
    for _ in range(8):
        with resuming(daemon.socket, call_id_of(ended[0])) as stream:
            stream.begin()
            first = next(stream.chunks())
            assert stream.headers["x-accel-buffering"] == "no"
            found = re.fullmatch(rb"retry: (\d+)\n\n", first)
            pauses.add(int(found[1]))
    assert min(pauses) >= 1000
    assert max(pauses) < 3000
    assert len(pauses) > 1


def test_last_event_id_header_takes_precedence_over_the_query(
    daemon: Daemon, ended: list[Frame]
) -> None:
    """A reconnecting EventSource sends both, because it keeps its first URL."""
    call_id = call_id_of(ended[0])
    with connect(daemon.socket) as connection:
        connection.sendall(
            f"GET /v1/calls/{call_id}/events?last_event_id={ended[0].id} HTTP/1.1\r\nhost: x\r\n"
            f"last-event-id: {ended[-2].id}\r\nconnection: close\r\n\r\n".encode()
        )
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    assert raw.count(b"\nevent: ") == 1
    assert f"id: {ended[-1].id}".encode() in raw


# -- hostile cursors -------------------------------------------------------------------------

MALFORMED = [
    "x", "1", ":", "1:", "-1:5", "1:2:3", "1.0:5", "0x1:5", "01:5", "1:05", "9" * 16 + ":1",
    "1:" + "9" * 16, "a" * 8000, "\xb2:5", "null",
]  # fmt: skip


@pytest.mark.parametrize("by", ["header", "query"])
def test_malformed_cursor_gets_one_resync_and_then_all_events(
    daemon: Daemon, ended: list[Frame], by: str
) -> None:
    call_id = call_id_of(ended[0])
    for cursor in MALFORMED:
        first, *rest = rest_of(daemon, call_id, cursor, by)
        assert (first.kind, first.id, rest) == ("resync", "", ended), cursor
        data = json.loads(first.data)
        assert (data["reason"], data["from"], data["given"]) == ("malformed", 0, cursor[:40])


def test_unknown_cursor_gets_one_resync_and_then_all_events(
    daemon: Daemon, ended: list[Frame]
) -> None:
    with streaming(daemon.socket, "run_python", program(tells=TELLS, value=1)) as stream:
        other = list(stream.events())
    call_id = call_id_of(ended[0])
    sequence, offset = map(int, ended[3].id.split(":"))
    last_sequence, last_offset = map(int, ended[-1].id.split(":"))
    cursors = [
        *(event.id for event in other),
        f"{sequence + 1}:{offset}",  # another event's place
        f"{sequence}:{offset + 1}",  # inside a line
        f"{sequence}:{offset - 1}",
        f"{last_sequence + 1}:{last_offset + len(ended[-1].data) + 100}",  # beyond the end
        f"{10**14}:{10**14}", "0:0", "0:1", "7:7",
    ]  # fmt: skip
    for cursor in cursors:
        first, *rest = rest_of(daemon, call_id, cursor)
        assert (first.kind, first.id, rest) == ("resync", "", ended), cursor
        assert json.loads(first.data)["reason"] == "unknown_event"


# -- whose, and whether ----------------------------------------------------------------------


@pytest.mark.row("D4")
def test_events_of_another_principals_call_are_not_found(
    daemon: Daemon, ended: list[Frame]
) -> None:
    """Neither while the call runs nor afterwards, and with any cursor."""
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        token = control.tokens.new("stranger", principal_id="stranger").secret
    stranger = f"authorization: Bearer {token}\r\n"
    answers = []
    with streaming(daemon.socket, "run_python", program(waits=True)) as stream:
        running = next(stream.events())
        for frame in (running, ended[0]):
            for after in (None, frame.id, "x"):
                with resuming(daemon.socket, call_id_of(frame), after, headers=stranger) as theirs:
                    answers.append(theirs.body()["error"])
                    assert theirs.status == 404
        with resuming(daemon.socket, "call_0", headers=stranger) as nobodys:
            answers.append(nobodys.body()["error"])
        with Client(daemon.socket) as client:
            client.cancel(call_id_of(running))
    assert {error["code"] for error in answers} == {"RESOURCE_NOT_FOUND"}
    assert len({error["message"] for error in answers}) == 1
    assert rest_of(daemon, call_id_of(ended[0]), None) == ended  # twin: its own caller


# -- kill -9 ---------------------------------------------------------------------------------


def killed_in_the_middle(own: Daemon, key: str | None = None) -> list[Frame]:
    """The events received from a call whose engine is killed while it runs."""
    options = {} if key is None else {"idempotency_key": key}
    arguments = program(tells=TELLS, waits=True)
    with streaming(own.socket, "run_python", arguments, **options) as stream:
        events = stream.events()
        seen = [next(events) for _ in range(len(TELLS) + 1)]
        own.process.kill()
        own.process.wait(timeout=DEADLINE_S)
    return seen


def test_killed_engine_loses_no_sent_event_and_its_successor_ends_the_stream() -> None:
    with running_scripted_daemon() as own:
        with streaming(own.socket, "run_python", program(tells=TELLS, value=1)) as stream:
            whole = list(stream.events())
        seen = killed_in_the_middle(own, key="k")
        with (own.home / "spool" / call_id_of(seen[0])).open("ab") as torn:
            torn.write(b'["tool_output",99,{"stream":"stdout","text":"ha')
        with running_scripted_daemon(own.home) as again:
            call_id = call_id_of(seen[0])
            for by in ("header", "query"):
                for number, cut in enumerate(seen):
                    *resumed, last = rest_of(again, call_id, cut.id, by)
                    assert resumed == seen[number + 1 :]
                    answer = json.loads(last.data)
                    assert (last.kind, answer["error"]["code"]) == (
                        "tool_error", "OUTCOME_UNKNOWN"
                    )  # fmt: skip
                    assert int(last.id.split(":")[0]) == len(seen)
                for number, cut in enumerate(whole):
                    assert rest_of(again, call_id_of(cut), cut.id, by) == whole[number + 1 :]
            assert answer["metadata"]["call_id"] == call_id
            assert answer["metadata"]["tool_name"] == "run_python"
            with Client(again.socket) as client:  # the log and the key say the same
                assert client.call_record(call_id).code == "OUTCOME_UNKNOWN"
                arguments = program(tells=TELLS, waits=True)
                repeated = client.call("run_python", arguments, idempotency_key="k")
            assert code_of(repeated) == "OUTCOME_UNKNOWN"
            # Once more: the end was written, and is not made a second time.
            again.process.kill()
            again.process.wait(timeout=DEADLINE_S)
            with running_scripted_daemon(own.home) as third:
                assert rest_of(third, call_id, seen[-1].id) == [last]


def test_ends_that_a_killed_engine_had_not_written_are_made_up_for() -> None:
    """Of a call with a key, whose answer is stored, of one without, and of one that may run again."""
    with running_scripted_daemon() as own:
        with Client(own.socket) as client:
            calls = []
            for options in ({"idempotency_key": "k"}, {}):
                arguments = program(tells=[["stdout", "x"]], value=5)
                with streaming(own.socket, "run_python", arguments, **options) as stream:
                    frames = list(stream.events())
                call_id = call_id_of(frames[0])
                assert client.call_record(call_id).code == "OK"  # the row is on the disk
                calls.append((call_id, frames))
        seen = killed_in_the_middle(own)
        for call_id, _ in calls:
            path = own.home / "spool" / call_id
            lines = path.read_bytes().splitlines(keepends=True)
            path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
        path = own.home / "spool" / call_id_of(seen[0])
        raw = path.read_bytes()
        path.write_bytes(raw.replace(b'"tool":"run_python"', b'"tool":"calculator"', 1))
        with running_scripted_daemon(own.home) as again:
            (_, stored), (lost_id, lost) = calls
            assert rest_of(again, call_id_of(stored[0]), stored[0].id) == stored[1:]
            *others, last = rest_of(again, lost_id, lost[0].id)
            with Client(again.socket) as client:
                assert client.call_record(lost_id).code == "OK"
            (end,) = rest_of(again, call_id_of(seen[0]), seen[-1].id)
    assert others == lost[1:-1]
    error = json.loads(last.data)["error"]
    assert (error["code"], error["details"]) == ("OUTCOME_UNKNOWN", {"logged_code": "OK"})
    error = json.loads(end.data)["error"]
    assert (error["code"], error["retryable"]) == ("SANDBOX_UNAVAILABLE", True)


def test_call_waiting_for_approval_still_waits_after_a_crash(tmp_path: Path) -> None:
    rules = tmp_path / "policy.toml"
    rules.write_text('[[rules]]\nid = "ask"\ndecision = "ask"\ntools = ["calculator"]\n')
    rules.chmod(0o600)
    with running_scripted_daemon(approver=True, policy_file=str(rules)) as own:
        arguments = {"expression": "40 + 2"}
        with streaming(own.socket, "calculator", arguments, wait_for_approval=True) as stream:
            events = stream.events()
            first, waiting = next(events), next(events)
            own.process.kill()
            own.process.wait(timeout=DEADLINE_S)
        assert "waits for approval" in json.loads(waiting.data)["message"]
        with running_scripted_daemon(own.home, policy_file=str(rules)) as again:
            (last,) = rest_of(again, call_id_of(first), waiting.id)
            error = json.loads(last.data)["error"]
            assert error["code"] == "REQUIRES_HUMAN_APPROVAL"
            with Client(again.socket) as client:
                assert client.approvals.show(error["approval_id"]).state == "pending"


# -- clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_client_that_reconnects_many_times_gets_every_event_exactly_once(
    daemon: Daemon, home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 60
    monkeypatch.setattr(rules, "FIRST_PAUSE_S", 0.001)
    tells = [["stdout", f"{number:04} " + "ä" * 40] for number in range(5 * count // 2)]
    process = psutil.Process(daemon.process.pid)
    before = process.num_fds()
    with (
        cutting_proxy(
            home / "proxy.sock", daemon.socket, least=600, most=1200, count=count
        ) as proxy,
        client_of(kind, proxy.path) as client,
    ):
        events = list(client.stream("run_python", program(tells=tells, value=7)))
    texts = [event.text for event in events if isinstance(event, OutputEvent)]
    assert "".join(texts) == "".join(text for _, text in tells)
    assert [int(event.id.partition(":")[0]) for event in events] == list(range(len(events)))
    assert isinstance(events[-1], ResultEvent)
    assert events[-1].envelope.data["value"] == 7
    assert proxy.cuts == count
    wait_until(lambda: process.num_fds() <= before + 2)  # nothing is left of the connections


def test_client_that_gives_up_reconnecting_names_call_and_last_event_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "FIRST_PAUSE_S", 0.001)
    with running_scripted_daemon() as own, ExitStack() as clients:
        followed = []
        for kind in KINDS:
            client = clients.enter_context(client_of(kind, own.socket))
            events = client.stream("run_python", program(tells=[["stdout", "so far"]], waits=True))
            followed.append((events, [next(events), next(events)][1]))
        own.process.kill()
        own.process.wait(timeout=DEADLINE_S)
        for events, last in followed:
            with pytest.raises(DaemonUnavailable) as gone:
                next(events)
            assert gone.value.may_have_acted
            for part in (last.metadata.call_id, last.id, "10 attempts", "No engine answers"):
                assert part in str(gone.value)


def test_client_follows_a_call_across_a_killed_engine() -> None:
    with running_scripted_daemon() as own, ExitStack() as clients:
        followed = []
        for kind in KINDS:
            client = clients.enter_context(client_of(kind, own.socket))
            events = client.stream("run_python", program(tells=TELLS, waits=True))
            followed.append((client, events, [next(events) for _ in range(4)]))
        own.process.kill()
        own.process.wait(timeout=DEADLINE_S)
        with running_scripted_daemon(own.home):
            for client, events, seen in followed:
                seen += list(events)
                call_id = seen[0].metadata.call_id
                assert list(client.follow(call_id, seen[2].id)) == seen[3:]
    # What the program told, or the engine had not written yet, when it was killed, is lost.
    for _, _, seen in followed:
        assert [int(event.id.partition(":")[0]) for event in seen] == list(range(len(seen)))
        assert 4 < len(seen) <= len(TELLS) + 2
        assert isinstance(seen[-1], ErrorEvent)
        assert seen[-1].envelope.error is not None
        assert seen[-1].envelope.error.code == "OUTCOME_UNKNOWN"


# -- a browser -------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "stream-output.md"

EVENT_SOURCE = r"""
const http = require("node:http");

// As the HTML standard has it, over a Unix socket; each of the first 9 connections is cut.
class EventSource {
  constructor(path) { this.path = path; this.id = ""; this.pause = 0; this.cuts = 0;
    this.listeners = {}; this.closed = false; setImmediate(() => this.connect()); }
  addEventListener(kind, listener) { this.listeners[kind] = listener; }
  close() { this.closed = true; this.request.destroy(); }
  connect() {
    const headers = this.id ? {"Last-Event-ID": this.id} : {};
    let buffer = "", left = this.cuts < 9 ? 60_000 : Infinity;
    this.request = http.get({socketPath: process.argv[2], path: this.path, headers}, (answer) => {
      answer.setEncoding("utf8");
      answer.on("data", (text) => {
        if (left < 0) return;
        left -= text.length;
        const blocks = (buffer + text).split("\n\n");
        buffer = blocks.pop();
        blocks.forEach((block) => this.take(block));
        if (left < 0 && !this.closed) { this.cuts++; this.request.destroy(); }
      });
      answer.on("close", () => { if (!this.closed) setTimeout(() => this.connect(), 1); });
      answer.on("error", () => {});
    });
    this.request.on("error", () => {});
  }
  take(block) {
    let kind = "message", data = null;
    for (const line of block.split("\n")) {
      const [, field, value] = line.match(/^([^:]*): ?([^\n]*)$/);
      if (field === "id") this.id = value;
      if (field === "event") kind = value;
      if (field === "data") data = value;
      if (field === "retry") this.pause = Number(value);
    }
    if (data !== null && !this.closed) this.listeners[kind]?.({data});
  }
}
"""
FOLLOWED = """
const seen = [];
follow(process.argv[3], (kind, data) => {
  seen.push([kind, data]);
  if (kind === "tool_result") process.stdout.write(JSON.stringify(seen));
});
"""


@pytest.mark.needs("node")
def test_howto_javascript_gets_every_event_once(
    daemon: Daemon, ended: list[Frame], tmp_path: Path
) -> None:
    """Uses a test EventSource, because this version of Node may lack one."""
    snippet, *_ = re.findall(
        r"^```javascript\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    script = tmp_path / "page.js"
    script.write_text(EVENT_SOURCE + snippet + FOLLOWED)
    done = subprocess.run(
        ["node", str(script), str(daemon.socket), call_id_of(ended[0])],
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == [[one.kind, json.loads(one.data)] for one in ended]

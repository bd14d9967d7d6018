"""The call log, through the socket and the command line of a real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon
from support.authority import Authority
from support.http import SocketClient
from support.wait import DEADLINE_S, wait_until

FIELDS = [
    "call_id", "timestamp", "principal_id", "agent_id", "session_id", "trace_id", "tool_name",
    "tool_version", "code", "ended_by", "execution_time_ms", "cpu_ms", "cost", "currency",
    "input_tokens", "output_tokens", "tokens_used", "cache_hit",
]  # fmt: skip

pytestmark = pytest.mark.row("D6", "D4")


NUMBER = count()


@pytest.fixture
def daemon(administered_daemon: Daemon) -> Daemon:
    """The shared daemon for a caller without earlier calls."""
    authority = Authority(administered_daemon.home, administered_daemon.credential)
    variable = {"FUMEHOOD_TOKEN": authority.token(f"log-{next(NUMBER)}")}
    return replace(administered_daemon, environment=administered_daemon.environment | variable)


@pytest.fixture
def own(daemon: Daemon) -> Iterator[SocketClient]:
    connected = SocketClient(daemon.socket, daemon.environment["FUMEHOOD_TOKEN"])
    yield connected
    connected.close()


def run(daemon: Daemon, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(FUMEHOOD), "calls", *arguments],
        env={**daemon.environment, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=600,
    )


def listed(client: SocketClient, query: str = "") -> list[dict[str, Any]]:
    answer = client.get(f"/v1/calls{query}")
    assert answer.status == 200, answer.body["error"]
    return answer.body["data"]["items"]


def test_call_log_entry_matches_the_envelope(start_daemon: StartDaemon) -> None:
    own = start_daemon().client()
    envelope = own.calculate("2 + 2", trace_id="mine").body
    (item,) = listed(own)
    assert list(item) == FIELDS
    metadata = envelope["metadata"]
    for name in ("call_id", "timestamp", "trace_id", "tool_name", "tool_version"):
        assert item[name] == metadata[name]
    assert item["execution_time_ms"] == metadata["execution_time_ms"]
    assert item["cpu_ms"] == metadata["resources"]["cpu_ms"]
    assert item["principal_id"] == f"uid:{os.getuid()}"
    assert (item["code"], item["ended_by"]) == ("OK", "ok")
    shown = own.get(f"/v1/calls/{item['call_id']}")
    data = shown.body["data"]
    assert (data["call"], data["approval"]) == (item, None)
    assert data["arguments"] == {"expression": "2 + 2"}
    assert data["envelope"]["data"] == envelope["data"]


def test_call_log_pages_and_filters_and_omits_dry_runs_and_malformed_requests(
    own: SocketClient,
) -> None:
    calls = [own.calculate(f"{number} / {number % 5}").body for number in range(25)]
    own.calculate("1", dry_run=True)
    own.post("/v1/tools/calculator/call", b"{")
    ids = [call["metadata"]["call_id"] for call in calls][::-1]
    first = own.get("/v1/calls").body["data"]
    assert [item["call_id"] for item in first["items"]] == ids[:10]
    pagination = first["pagination"]
    assert (pagination["has_more"], pagination["total_count"]) == (True, None)
    second = own.get(f"/v1/calls?limit=100&cursor={pagination['next_cursor']}").body["data"]
    assert [item["call_id"] for item in second["items"]] == ids[10:]
    assert second["pagination"]["next_cursor"] is None
    assert {item["code"] for item in listed(own, "?code=EXECUTION_ERROR&limit=100")} == {
        "EXECUTION_ERROR"
    }
    assert len(listed(own, "?code=EXECUTION_ERROR&limit=100")) == 5
    assert len(listed(own, "?tool=calculator&limit=100")) == 25
    assert listed(own, "?tool=other") == []
    moment = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert listed(own, f"?since={quote(moment)}") == []
    assert len(listed(own, f"?until={quote(moment)}&limit=100")) == 25


@pytest.mark.parametrize(
    ("query", "code", "fields"),
    [
        ("?limit=ten", "INVALID_PARAMS", ["limit"]),
        ("?code=ok&agent=%20", "INVALID_PARAMS", ["agent", "code"]),
        ("?principal=uid:1", "INVALID_PARAMS", ["principal"]),
        ("?self=1", "INVALID_PARAMS", ["self"]),
        ("?limit=5&limit=6", "INVALID_PARAMS", None),
        ("?cursor=" + "%27 OR 1=1".replace(" ", "%20"), "INVALID_PARAMS", ["cursor"]),
        ("?cursor=call_000000000000000000000000", "RESOURCE_NOT_FOUND", None),
        ("/call_000000000000000000000000", "RESOURCE_NOT_FOUND", None),
        ("/%27%3B%20DROP%20TABLE%20calls", "RESOURCE_NOT_FOUND", None),
        ("/", "RESOURCE_NOT_FOUND", None),
    ],
)
def test_invalid_call_log_query_is_refused_with_its_error_code(
    client: SocketClient, query: str, code: str, fields: list[str] | None
) -> None:
    answer = client.get(f"/v1/calls{query}")
    assert answer.code == code
    if fields is not None:
        assert sorted(answer.body["error"]["fields"]) == fields


def test_command_line_lists_filters_and_shows_calls(daemon: Daemon, own: SocketClient) -> None:
    ids = [own.calculate(f"1 / {number % 2}").body["metadata"]["call_id"] for number in range(120)]
    records = json.loads(run(daemon, "list").stdout)
    assert [record["call_id"] for record in records] == ids[:-11:-1]
    everything = json.loads(run(daemon, "list", "--limit", "1000", "--since", "1h").stdout)
    assert [record["call_id"] for record in everything] == ids[::-1]
    failed = json.loads(run(daemon, "list", "--code", "EXECUTION_ERROR", "--limit", "99").stdout)
    assert len(failed) == 60
    assert json.loads(run(daemon, "list", "--since", "2999-01-01").stdout) == []
    assert json.loads(run(daemon, "list", "--agent", "nobody").stdout) == []
    assert json.loads(run(daemon, "show", ids[7]).stdout)["call_id"] == ids[7]
    missing = run(daemon, "show", "call_0")
    assert (missing.returncode, json.loads(missing.stdout)["error"]["code"]) == (
        1, "RESOURCE_NOT_FOUND",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["list", "--since", "yesterday"], 2),
        (["list", "--since", "999999d", "--json"], 2),
        (["list", "--limit", "0"], 2),
        (["list", "--limit", "1001"], 2),
        (["list", "--code", "ok"], 1),
        (["list", "--since", "2026-01-31T09:30"], 0),
        (["list", "--since", "7d", "--tool", "calculator@1.0.0"], 0),
        (["tail", "--since", "soon"], 2),
        (["nonsense"], 2),
    ],
)
def test_calls_command_exit_status_matches_the_outcome(
    shared_daemon: Daemon, arguments: list[str], code: int
) -> None:
    answer = run(shared_daemon, *arguments)
    assert answer.returncode == code, answer.stderr
    assert b"Traceback" not in answer.stderr


def test_calls_tail_prints_new_calls_in_order_until_interrupted(
    daemon: Daemon, own: SocketClient
) -> None:
    ids = [own.calculate("1").body["metadata"]["call_id"] for _ in range(15)]
    with subprocess.Popen(
        [str(FUMEHOOD), "calls", "tail"], env=daemon.environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as tail:  # fmt: skip
        assert tail.stderr is not None
        lines = [json.loads(tail.stdout.readline()) for _ in range(10)]
        assert [line["call_id"] for line in lines] == ids[5:]
        more = [own.calculate("1").body["metadata"]["call_id"] for _ in range(150)]
        seen: list[str] = []
        reader = threading.Thread(
            target=lambda: seen.extend(json.loads(line)["call_id"] for line in tail.stdout or ())
        )
        reader.start()
        wait_until(lambda: len(seen) >= 150)
        tail.send_signal(signal.SIGINT)
        assert tail.wait(timeout=DEADLINE_S) == 0
        reader.join(timeout=DEADLINE_S)
        assert tail.stderr.read() == b""
    assert seen == more


def test_calls_tail_survives_daemon_restart(start_daemon: StartDaemon, home: Path) -> None:
    before = start_daemon()
    with subprocess.Popen(
        [str(FUMEHOOD), "calls", "tail", "--json"], env=before.environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as tail:  # fmt: skip
        assert tail.stdout is not None
        for number in range(2):
            with contextlib.closing((before if number == 0 else start_daemon()).client()) as own:
                call_id = own.calculate("1").body["metadata"]["call_id"]
            assert json.loads(tail.stdout.readline())["call_id"] == call_id
            if number == 0:
                assert before.stop() == 0
                assert b"Waiting for it." in tail.stderr.readline()
        tail.send_signal(signal.SIGINT)
        assert tail.wait(timeout=DEADLINE_S) == 0
        assert tail.stderr.read() == b""


def test_forged_tool_name_cannot_inject_a_line_into_terminal_output(
    daemon: Daemon, own: SocketClient
) -> None:
    forged = quote("x\ncalculator@1.0.0  OK\x1b[2J\u202e", safe="")
    assert own.post(f"/v1/tools/{forged}/call", b"{}").code == "TOOL_NOT_FOUND"
    own.calculate("1")
    ours, theirs = pty.openpty()
    environment = {**daemon.environment, "TERM": "dumb", "COLUMNS": "300"}
    done = subprocess.run(
        [str(FUMEHOOD), "calls", "list"], env=environment, stdout=theirs, stderr=theirs,
        stdin=subprocess.DEVNULL, timeout=600, check=False,
    )  # fmt: skip
    tail = subprocess.Popen(
        [str(FUMEHOOD), "calls", "tail"], env=environment, stdout=theirs, stderr=theirs,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    shown = b""
    while shown.count(b"call_") < 4:
        shown += os.read(ours, 65536)
    tail.send_signal(signal.SIGINT)
    assert tail.wait(timeout=DEADLINE_S) == 0
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0
    text = shown.decode()
    assert "calculator@1.0.0" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert not [line for line in text.splitlines() if line.startswith("calculator")]
    form = re.compile(r"([0-9]{4}-[0-9-]{5} )?[0-9:]{8}  .*  [0-9.]+ ms  call_\w+")
    followed = [line for line in text.splitlines() if form.fullmatch(line)]
    assert [("x\\u{000a}calculator" in line) for line in followed[-2:]] == [True, False]

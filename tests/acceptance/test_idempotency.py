"""Repeated calls with an idempotency key, through the socket, command line and client."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon
from fumehood import Client
from support.http import SocketClient
from support.wait import DEADLINE_S

pytestmark = pytest.mark.row("P3")

CALL = "/v1/tools/calculator/call"


def body(expression: str, key: str | None) -> bytes:
    options = {} if key is None else {"idempotency_key": key}
    return json.dumps({"arguments": {"expression": expression}, "options": options}).encode()


def sent(client: SocketClient, expression: str, key: str | None = "k") -> tuple[int, Any]:
    answer = client.post(CALL, body(expression, key))
    return answer.status, answer.body


def test_idempotency_key_replays_after_daemon_kill_and_conflicts_on_other_arguments(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    client = daemon.client()
    status, first = sent(client, "1 + 1")
    assert (status, first["data"]["value"]) == (200, 2)
    assert "idempotent_replay" not in first["metadata"]
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait(timeout=DEADLINE_S)
    client = start_daemon().client()
    status, again = sent(client, "1 + 1")
    assert status == 200
    assert again["metadata"].pop("idempotent_replay") is True
    assert again == first
    status, other = sent(client, "1 + 2")
    assert (status, other["error"]["code"]) == (409, "IDEMPOTENCY_CONFLICT")
    assert other["error"]["details"] == {"call_id": first["metadata"]["call_id"]}
    assert other["error"]["retryable"] is False


def test_command_line_auto_idempotency_key_replays_the_first_answer(shared_daemon: Daemon) -> None:
    def call(*more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(FUMEHOOD), "call", "calculator", '{"expression": "6 * 7"}', *more],
            env=shared_daemon.environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=600,
        )  # fmt: skip

    answers = [json.loads(call("--idempotency-key", "auto").stdout) for _ in range(2)]
    replays = [answer["metadata"].get("idempotent_replay", False) for answer in answers]
    assert replays == [False, True]
    assert answers[0]["metadata"]["call_id"] == answers[1]["metadata"]["call_id"]
    assert call("--idempotency-key", "k", "--local").returncode == 2
    assert call("--idempotency-key", "").returncode == 1


def test_client_call_and_stream_replay_the_stored_answer(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.socket) as client:
        first = client.call("calculator", {"expression": "7 * 7"}, idempotency_key="client")
        again = client.call("calculator", {"expression": "7 * 7"}, idempotency_key="client")
        assert (first.metadata.idempotent_replay, again.metadata.idempotent_replay) == (False, True)
        events = list(
            client.stream("calculator", {"expression": "7 * 7"}, idempotency_key="client")
        )
    assert events[-1].type == "tool_result"
    assert again.data == first.data
    calls = shared_daemon.client()
    found = calls.get(f"/v1/calls/{first.metadata.call_id}")
    assert found.status == 200

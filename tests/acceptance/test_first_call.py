"""One call, end to end, through a real daemon."""

from __future__ import annotations

import json
import subprocess

import pytest

from conftest import FUMEHOOD, Daemon
from support.http import SocketClient


@pytest.mark.needs("curl")
@pytest.mark.row("D1", "E1")
def test_curl_call_over_unix_socket_returns_standard_envelope(shared_daemon: Daemon) -> None:
    answer = subprocess.run(
        [
            "curl", "--silent", "--unix-socket", str(shared_daemon.socket),
            "http://fumehood/v1/tools/calculator/call",
            "--header", "content-type: application/json",
            "--data", '{"arguments": {"expression": "5! + 2**10"}}',
        ],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    envelope = json.loads(answer.stdout)
    assert list(envelope) == ["success", "status", "data", "error", "metadata"]
    assert envelope["success"] is True
    assert envelope["data"] == {"value": 1144, "text": "1144"}
    assert envelope["error"] is None


@pytest.mark.row("D1")
def test_command_line_calls_through_the_daemon(shared_daemon: Daemon) -> None:
    answer = subprocess.run(
        [str(FUMEHOOD), "call", "calculator", '{"expression": "1 + 1"}'],
        env=shared_daemon.environment,
        capture_output=True,
        timeout=30,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["data"] == {"value": 2, "text": "2"}


@pytest.mark.row("S4", "E1")
def test_oversized_power_is_refused_as_policy_violation_and_next_call_succeeds(
    client: SocketClient,
) -> None:
    refused = client.calculate("9**9**9")
    assert (refused.status, refused.code) == (403, "SANDBOX_VIOLATION")
    assert refused.body["metadata"]["sandbox"]["ended_by"] == "policy"
    assert client.calculate("1 + 1").body["data"]["value"] == 2

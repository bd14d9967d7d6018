"""Batches of calls through the socket, the client and the command line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, make_first_approver
from fumehood import AsyncClient, Client, Refused
from support.answers import code_of
from support.clients import LEAVES_SOCKETS
from support.http import Answer, SocketClient, connect
from support.terminal import on_a_terminal
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.row("P9"), *LEAVES_SOCKETS]

ENDLESS = {"tool": "run_restricted_python", "arguments": {"code": "while True:\n    pass"}}
POLICY = """
[[rules]]
id = "a-human-first"
decision = "ask"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
equals = "40 + 2"
"""


def sums(*expressions: str) -> list[dict[str, Any]]:
    return [{"tool": "calculator", "arguments": {"expression": text}} for text in expressions]


def post(client: SocketClient, calls: Any, **options: Any) -> Answer:
    body = {"calls": calls, "options": options}
    return client.post("/v1/calls", json.dumps(body).encode())


def codes(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    results = answer.body["data"]["results"]
    for result in results:
        assert list(result) == ["success", "status", "data", "error", "metadata"]
    return ["OK" if found["success"] else found["error"]["code"] for found in results]


def test_batch_returns_one_envelope_per_call_in_order(shared_daemon: Daemon) -> None:
    client = shared_daemon.client()
    calls: list[Any] = sums(
        *("10000!" if number % 7 == 3 else f"{number} * 2" for number in range(100))
    )
    calls[10:10] = [{"tool": "nothing"}, 7, {"tool": "calculator", "argument": {}}]
    answer = post(client, calls, max_parallel=16)
    found = codes(answer)
    assert found[10:13] == ["TOOL_NOT_FOUND", "INVALID_PARAMS", "INVALID_PARAMS"]
    results = answer.body["data"]["results"]
    del results[10:13]
    assert len(results) == 100
    for number, result in enumerate(results):
        if number % 7 != 3:
            assert result["data"]["value"] == number * 2
    assert answer.body["success"] is True
    assert answer.body["metadata"]["call_id"] is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[]", 400), (b'{"calls": [{}], "calls": [{}]}', 400),
        (b'{"calls": ["' + b"x" * (8 << 20) + b'"]}', 413),
        (json.dumps({"calls": [{}] * 1000}).encode(), 200),
    ],
)  # fmt: skip
def test_malformed_or_oversized_batch_body_is_refused(
    shared_daemon: Daemon, body: bytes, status: int
) -> None:
    client = shared_daemon.client()
    answer = client.post("/v1/calls", body)
    assert answer.status == status
    if status == 400:
        assert answer.code == "INVALID_PARAMS"


def test_batch_parks_only_the_call_that_needs_approval(
    start_daemon: StartDaemon, home: Path
) -> None:
    make_first_approver(home)
    rules = home / "policy.toml"
    rules.write_text(POLICY, encoding="utf-8")
    rules.chmod(0o600)
    client = start_daemon(policy_file=str(rules)).client()
    answer = post(client, sums("1 + 1", "40 + 2", "1 + 2"))
    assert codes(answer) == ["OK", "REQUIRES_HUMAN_APPROVAL", "OK"]
    approval = answer.body["data"]["results"][1]["error"]["approval_id"]
    assert client.get(f"/v1/approvals/{approval}").body["data"]["approval"]["state"] == "pending"


def test_batch_deadline_cancels_running_call_and_starts_no_other(start_daemon: StartDaemon) -> None:
    client = start_daemon().client()
    answer = post(client, [ENDLESS, *sums("1 + 1")], timeout_seconds=0.5, parallel_tool_calls=False)
    assert codes(answer) == ["CANCELLED", "TIMEOUT"]
    assert answer.body["data"]["results"][1]["error"]["retryable"] is True
    logged = client.get("/v1/calls").body["data"]["items"]
    assert [row["code"] for row in logged] == ["CANCELLED"]
    assert codes(post(client, sums("1 + 1"), timeout_seconds=60)) == ["OK"]


def test_client_disconnect_cancels_running_batch_call_and_skips_the_rest(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(interpreter__timeout_seconds="60")
    endless = {**ENDLESS, "options": {"timeout_seconds": 60}}
    calls = [*sums("1 + 1"), endless, *sums("1 + 2")]
    body = json.dumps({"calls": calls, "options": {"parallel_tool_calls": False}}).encode()
    connection = connect(daemon.socket)
    connection.sendall(
        b"POST /v1/calls HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    with Client(daemon.socket) as client:
        wait_until(lambda: len(client.calls().items) == 1)  # the second has begun by then
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_until(lambda: len(client.calls().items) == 2)
        assert client.call("calculator", {"expression": "1 + 3"}).success
        codes = [row.code for row in client.calls().items]
        assert codes == ["OK", "CANCELLED", "OK"]


def test_engine_shutdown_answers_running_batch_with_shutting_down(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(drain_seconds="0.2", interpreter__timeout_seconds="60")
    watcher, client = daemon.client(), daemon.client()
    endless = {**ENDLESS, "options": {"timeout_seconds": 60}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            post, client, [*sums("1 + 1"), endless, *sums("1")], parallel_tool_calls=False
        )
        wait_until(lambda: len(watcher.get("/v1/calls").body["data"]["items"]) == 1)
        assert daemon.stop() == 0
        stopped = answer.result(timeout=DEADLINE_S)
    assert (stopped.status, stopped.code) == (503, "SHUTTING_DOWN")


@pytest.mark.anyio
async def test_async_and_blocking_clients_return_batch_envelopes(shared_daemon: Daemon) -> None:
    calls = sums("1 + 1", "1 / 0", "3!")
    async with AsyncClient(shared_daemon.socket) as client:
        first, second, third = await client.batch(calls, max_parallel=2)
        with pytest.raises(Refused) as refused:
            await client.batch([])
    assert (first.data["value"], third.data["value"]) == (2, 6)
    assert code_of(second) == "EXECUTION_ERROR"
    assert refused.value.code == "INVALID_PARAMS"
    with Client(shared_daemon.socket) as blocking:
        assert [found.success for found in blocking.batch(calls)] == [True, False, True]


def batch(
    daemon: Daemon, given: str, file: Path | None = None, *more: str
) -> tuple[int, list[Any], str]:
    """Exit status, the envelopes on standard output, and standard error of the command."""
    if file is not None:
        file.write_text(given, encoding="utf-8")
    done = subprocess.run(
        [str(FUMEHOOD), "call", "--batch", "-" if file is None else str(file), *more],
        env=daemon.environment, input=given.encode(), capture_output=True, timeout=600,
    )  # fmt: skip
    lines = done.stdout.decode().splitlines()
    return done.returncode, [json.loads(line) for line in lines], done.stderr.decode()


def test_command_line_batch_reads_json_lines_and_json_array(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    many = sums(*(f"{number} + 1" for number in range(150)))
    lines = "\n".join(json.dumps(call) for call in many) + "\n\n"
    status, found, said = batch(shared_daemon, lines)
    assert (status, said) == (0, "")
    assert [envelope["data"]["value"] for envelope in found] == list(range(1, 151))
    array = json.dumps([*sums("1 + 1"), 7, *sums("1 / 0")], indent=2)
    status, found, _ = batch(shared_daemon, array, tmp_path / "calls.json", "--json")
    assert status == 1
    assert [envelope["success"] for envelope in found] == [True, False, False]


def test_interrupted_command_line_batch_prints_answers_received_so_far(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon(interpreter__timeout_seconds="60")
    endless = {**ENDLESS, "options": {"timeout_seconds": 60}}
    file = tmp_path / "calls.json"
    file.write_text(json.dumps([*sums(*(["1 + 1"] * 16)), endless]), encoding="utf-8")
    command = subprocess.Popen(
        [FUMEHOOD, "call", "--batch", str(file)],
        env=daemon.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    answers = [json.loads(command.stdout.readline()) for _ in range(16)]
    assert all(answer["success"] for answer in answers)
    time.sleep(0.3)  # the rest is sent
    command.send_signal(signal.SIGINT)
    rest, said = command.communicate(timeout=DEADLINE_S)
    assert (command.returncode, rest) == (130, b"")
    assert b"Interrupted: 16 of 17 calls are answered above." in said
    with Client(daemon.socket) as client:
        wait_until(lambda: client.calls().items[0].code == "CANCELLED")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "no calls"), ("[]", "no calls"), ('{"tool": "a"}\n{', "line 2"),
        ('[{"tool": "a"}', "cannot be read"), ('{"tool": "a", "tool": "b"}', "line 1"),
    ],
)  # fmt: skip
def test_invalid_batch_file_is_a_usage_error(shared_daemon: Daemon, given: str, says: str) -> None:
    status, found, said = batch(shared_daemon, given)
    assert (status, found) == (2, [])
    assert says in said


@pytest.mark.parametrize("more", [["calculator"], ["--dry-run"], ["--local"], ["--timeout", "1"]])
def test_single_call_option_with_batch_is_a_usage_error(
    shared_daemon: Daemon, more: list[str]
) -> None:
    status, found, said = batch(shared_daemon, json.dumps(sums("1")), None, *more)
    assert (status, found) == (2, [])
    assert "--batch goes with" in said


def test_terminal_batch_output_is_one_sanitized_line_per_call(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    file = tmp_path / "calls.json"
    file.write_text(
        json.dumps([*sums("1 + 1"), {"tool": "no\u202eth\x1b[2Jing"}]), encoding="utf-8"
    )
    for term in ("dumb", "xterm"):
        status, shown = on_a_terminal(
            shared_daemon.environment, "call", "--batch", str(file), term=term, columns=200
        )
        assert status == 1
        assert 'OK  calculator  {"value": 2, "text": "2"}' in shown
        assert "TOOL_NOT_FOUND  no" in shown
        assert "\u202e" not in shown
        assert "\x1b[2J" not in shown
        assert ("2/2" in shown) == (term == "xterm")

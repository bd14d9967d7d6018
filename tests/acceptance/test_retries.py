"""P6 and P7 through the socket: retries, fallbacks and circuits as callers see them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, running_daemon
from fumehood import Client
from support.definition_files import DefinitionDirectory
from support.packages import install
from support.streaming import streaming
from support.wait import wait_until
from upstream import Reply, Upstream

BANK = '''
from fumehood import ToolError, tool

calls = {}

def asked(what):
    """How often this was asked before."""
    calls[what] = calls.get(what, 0) + 1
    return calls[what] - 1

@tool(sandboxed=False, idempotent=True, retry_count=3)
async def rate(currency: str) -> dict:
    """Read a rate from a service that fails twice."""
    before = asked(currency)
    if before < 2:
        raise ToolError("BANK_BUSY", "The bank has too many customers.", retryable=True)
    return {"currency": currency, "rate": 1.25, "asked": before + 1}

@tool(sandboxed=False, retry_count=3)
async def pay(amount: int) -> dict:
    """Pay, which must not be done twice."""
    asked("pay")
    raise ToolError("BANK_BUSY", "The bank has too many customers.", retryable=True)

@tool(sandboxed=False, read_only=True, retry_count=1, fallback="rate_of_yesterday")
async def rate_of_today(currency: str) -> dict:
    """Read a rate from a service that always fails."""
    raise ToolError("BANK_BUSY", "The bank has too many customers.", retryable=True)

@tool(sandboxed=False, read_only=True)
async def rate_of_yesterday(currency: str) -> dict:
    """Read an old rate from a file."""
    return {"currency": currency, "rate": 1.2, "paid": calls.get("pay", 0)}

tools = [rate, pay, rate_of_today, rate_of_yesterday]
'''


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the bank tools."""
    variables = install(tmp_path_factory.mktemp("packages"), "bank", BANK)
    host_tools = "rate,pay,rate_of_today,rate_of_yesterday"
    with running_daemon(variables, host_tools=host_tools, log_format="json") as running:
        yield running


@pytest.mark.row("P6", "P11", "D2")
def test_retries_of_idempotent_tool_are_counted_streamed_and_logged(daemon: Daemon) -> None:
    client = daemon.client()
    logged = daemon.log.count('"event":"call.retrying"')
    answer = client.call("rate", {"currency": "CHF"}).body
    assert answer["data"] == {"currency": "CHF", "rate": 1.25, "asked": 3}
    assert answer["metadata"]["retry_count"] == 2
    assert answer["metadata"]["warnings"] == []
    with streaming(daemon.socket, "rate", {"currency": "SEK"}) as stream:
        events = stream.data()
    assert [kind for kind, _ in events] == [
        "tool_progress", "tool_retrying", "tool_retrying", "tool_result",
    ]  # fmt: skip
    for number, (_, data) in enumerate(events[1:3], start=1):
        assert (data["retry_count"], data["max_retries"]) == (number, 3)
        assert data["error"]["code"] == "BANK_BUSY"
        assert data["metadata"]["call_id"] == events[-1][1]["metadata"]["call_id"]
    assert events[-1][1]["metadata"]["retry_count"] == 2
    once = client.call("rate", {"currency": "NOK"}, enable_retry=False)
    assert (once.status, once.body["error"]["code"]) == (422, "BANK_BUSY")
    assert once.body["metadata"]["retry_count"] == 0
    wait_until(lambda: daemon.log.count('"event":"call.retrying"') == logged + 4)


@pytest.mark.row("P6", "P7")
def test_non_idempotent_tool_is_not_retried_and_fallback_answers_for_failed_tool(
    daemon: Daemon,
) -> None:
    client = daemon.client()
    paid = client.call("pay", {"amount": 1}).body
    assert (paid["error"]["code"], paid["metadata"]["retry_count"]) == ("BANK_BUSY", 0)
    answer = client.call("rate_of_today", {"currency": "CHF"}).body
    assert answer["data"] == {"currency": "CHF", "rate": 1.2, "paid": 1}
    assert (answer["success"], answer["error"]) == (True, None)
    told = answer["metadata"]["fallback"]
    assert (told["tool"], told["answered"]) == ("rate_of_yesterday", True)
    assert told["error"]["code"] == "BANK_BUSY"
    assert answer["metadata"]["tool_name"] == "rate_of_today"
    assert answer["metadata"]["retry_count"] == 1
    recorded = client.get(f"/v1/calls/{told['call_id']}").body["data"]["call"]
    assert (recorded["tool_name"], recorded["code"]) == ("rate_of_yesterday", "OK")


@pytest.mark.row("P6", "D2")
def test_command_line_stream_prints_retries_on_stderr(daemon: Daemon) -> None:
    done = subprocess.run(
        [FUMEHOOD, "call", "--stream", "rate", '{"currency": "DKK"}'],
        env=daemon.environment, capture_output=True, timeout=600, check=True,
    )  # fmt: skip
    said = done.stderr.decode()
    assert "BANK_BUSY: The bank has too many customers. Retry 1 of 3.\n" in said
    assert "Retry 2 of 3." in said


@pytest.mark.row("P7", "D7")
def test_circuit_opens_after_failures_is_shown_and_closes_after_recovery(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, upstream: Upstream
) -> None:
    definitions.put_tools("weather.json", "weather", endpoint=f"{upstream.url}/now")
    daemon = start_daemon(
        tools_directory=str(definitions.path), rest__allowed_hosts=json.dumps([upstream.authority]),
        circuits__min_failures="2", circuits__open_seconds="1", circuits__trials="1",
    )  # fmt: skip
    upstream.script("/now", Reply(500), Reply(500), Reply(body=b'{"sky": "clear"}'))
    with Client(daemon.socket) as client:
        assert client.tool("calculator").circuit is None
        failed = [client.call("weather").error for _ in range(3)]
        codes = [error.code for error in failed if error is not None]
        assert codes == ["NETWORK_ERROR", "NETWORK_ERROR", "CIRCUIT_OPEN"]
        assert failed[2] is not None
        assert 0 < (failed[2].retry_after_ms or 0) <= 1000
        assert upstream.count("/now") == 2  # nothing was sent
        circuit = client.tool("weather").circuit
        assert (circuit.upstream, circuit.requests, circuit.failures) == (upstream.authority, 2, 2)
        assert client.ready().broken_circuits == 1
        wait_until(lambda: client.call("weather").success)
        assert client.ready().broken_circuits == 0
    shown = subprocess.run(
        [FUMEHOOD, "tools", "show", "weather"],
        env=daemon.environment, capture_output=True, timeout=600, check=True,
    )  # fmt: skip
    assert json.loads(shown.stdout)["name"] == "weather"
    said = shown.stderr.decode().strip()
    assert said.startswith(f"circuit to {upstream.authority}: closed, 0 of the last ")

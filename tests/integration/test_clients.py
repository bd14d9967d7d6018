"""Both clients against a real daemon: typed answers, a killed daemon and many calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon, StartDaemon
from fumehood import AsyncClient, Client, DaemonUnavailable
from support.clients import KINDS, LEAVES_SOCKETS, client_of
from support.wait import DEADLINE_S, wait_until

pytestmark = [*LEAVES_SOCKETS]

POWER = "pow(7, 10**3000, 10**3000 + 7)"
LONG_ENOUGH_S = 30


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(kind: str, administered_daemon: Daemon) -> Iterator[Any]:
    with client_of(kind, administered_daemon.socket) as made:
        yield made


@pytest.fixture
def control(kind: str, administered_daemon: Daemon) -> Iterator[Any]:
    credential = administered_daemon.credential
    with client_of(kind, administered_daemon.control, control=True, credential=credential) as made:
        yield made


@pytest.mark.row("D1")
def test_caller_methods_return_typed_answers(client: Any) -> None:
    answer = client.call("calculator", {"expression": "1/3"}, trace_id="mine")
    assert answer.data["value"] == 1 / 3
    assert answer.metadata.trace_id == "mine"
    refused = client.call("calculator", {"expression": "1 / 0"})
    assert refused.error.code == "EXECUTION_ERROR"
    assert "calculator" in [tool.name for tool in client.tools()]
    details = client.tool("calculator")
    assert (details.tool.name, details.versions) == ("calculator", ("1.0.0",))
    assert client.health().status == "ok"
    assert client.ready().status == "ready"
    assert client.ready().walls["interpreter"].ready
    assert client.openapi()["info"]["title"] == "fumehood"
    assert client.request("GET", "/v1/tools/calculator").success


@pytest.mark.row("D1", "D6")
def test_client_reconnects_after_a_daemon_was_killed(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    with Client(daemon.socket) as client:
        assert client.call("calculator", {"expression": "1 + 1"}).success
        daemon.process.kill()
        daemon.process.wait(timeout=DEADLINE_S)
        with pytest.raises(DaemonUnavailable, match="fumehood serve") as caught:
            client.call("calculator", {"expression": "1 + 1"})
        assert caught.value.may_have_acted is False
        start_daemon()
        assert client.call("calculator", {"expression": "1 + 1"}).success
        assert client.ready().status == "ready"


@pytest.mark.row("P8", "D1")
@pytest.mark.anyio
async def test_cancelling_an_async_call_stops_waiting_but_not_the_call(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(log_level="debug")
    async with AsyncClient(daemon.socket) as client:
        call = client.call(
            "calculator", {"expression": POWER}, trace_id="left", timeout_seconds=LONG_ENOUGH_S
        )
        waiting = asyncio.ensure_future(call)
        await asyncio.to_thread(wait_until, lambda: "call.intent" in daemon.log)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await client.call("calculator", {"expression": "1 + 1"})).success
        await asyncio.to_thread(wait_until, lambda: _ended(daemon, "left"))
    assert _ended(daemon, "left") == ["OK"]


@pytest.mark.row("D1")
@pytest.mark.anyio
async def test_one_async_client_serves_many_concurrent_calls(administered_daemon: Daemon) -> None:
    async with AsyncClient(administered_daemon.socket) as client:
        calls = (client.call("calculator", {"expression": f"{n} + 1"}) for n in range(200))
        answers = await asyncio.gather(*calls)
    assert [answer.data["value"] for answer in answers] == list(range(1, 201))


def test_missing_socket_is_daemon_unavailable(kind: str, home: Path) -> None:
    with client_of(kind, home / "engine.sock") as client:
        followed = lambda: next(iter(client.stream("calculator")))  # noqa: E731
        for ask in (client.health, client.tools, lambda: client.call("calculator"), followed):
            with pytest.raises(DaemonUnavailable, match="fumehood serve") as caught:
                ask()
            assert caught.value.may_have_acted is False


def _ended(daemon: Daemon, trace_id: str) -> list[str]:
    events = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    return [e["code"] for e in events if e["event"] == "call.ended" and e["trace_id"] == trace_id]

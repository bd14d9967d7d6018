"""Both clients against a real daemon: every method, restarts and a killed daemon."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon, StartDaemon
from fumehood import AsyncClient, Client, DaemonUnavailable, Engine, Refused
from fumehood.answers import ToolDetails
from support.clients import KINDS, LEAVES_SOCKETS, client_of
from support.wait import wait_until

pytestmark = [*LEAVES_SOCKETS]

POWER = "pow(7, 10**3000, 10**3000 + 7)"
SLOW = "+".join([POWER] * 9)
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
    assert refused.error is not None
    assert refused.error.code == "EXECUTION_ERROR"
    assert "calculator" in [tool.name for tool in client.tools()]
    details = client.tool("calculator")
    assert (details.tool.name, details.versions) == ("calculator", ("1.0.0",))
    assert client.health().status == "ok"
    assert client.ready().status == "ready"
    assert client.ready().walls["interpreter"].ready
    assert client.openapi()["info"]["title"] == "fumehood"
    assert client.request("GET", "/v1/tools/calculator").success


@pytest.mark.row("D1")
@pytest.mark.anyio
async def test_client_answers_equal_those_of_an_embedded_engine(
    engine: Engine, administered_daemon: Daemon
) -> None:
    def without_what_differs(envelope: Any) -> dict[str, Any]:
        document = envelope.model_dump()
        for name in (
            "call_id", "trace_id", "timestamp", "execution_time_ms", "performance", "resources",
        ):  # fmt: skip
            del document["metadata"][name]
        return document

    async with AsyncClient(administered_daemon.socket) as client:
        for arguments in ({"expression": "5!"}, {"expression": "2 ^ 3"}, {}):
            remote = await client.call("calculator", arguments)
            local = await engine.call("calculator", arguments)
            assert without_what_differs(remote) == without_what_differs(local)
        assert await client.tools() == engine.tools()
        details = await client.tool("calculator")
        assert isinstance(details, ToolDetails)
        assert details == engine.tool("calculator")
        remote_ready, local_ready = await client.ready(), engine.ready()
        assert (remote_ready.status, remote_ready.state) == (local_ready.status, local_ready.state)
        # An engine without state has not looked at Docker yet, so it says nothing of containers.
        assert set(remote_ready.walls) == {*local_ready.walls, "container"}
        for name, wall in local_ready.walls.items():
            assert remote_ready.walls[name] == wall


@pytest.mark.row("D1", "T1")
def test_unknown_tool_is_refused_with_its_name(client: Any) -> None:
    with pytest.raises(Refused) as caught:
        client.tool("nothing")
    assert caught.value.code == "TOOL_NOT_FOUND"
    assert caught.value.envelope.metadata.tool_name == "nothing"


@pytest.mark.row("R3", "D1")
def test_agents_are_created_bound_updated_and_deleted(kind: str, control: Any, client: Any) -> None:
    name = f"clerk-{kind}"
    mine = f"uid:{os.getuid()}"
    agent = control.agents.create(name, description="Adds.", principals=[mine])
    assert (agent.id, agent.principals, agent.is_enabled) == (name, (mine,), True)
    assert agent in control.agents.list()
    binding = control.agents.bind(name, "calculator", sort_order=3, fixed={"precision": 2})
    assert control.agents.bindings(name) == (binding,)
    assert control.agents.show(name).agent == agent
    assert control.agents.show(name).tools == (binding,)
    seen = client.agent_tools(name)
    assert [tool.name for tool in seen.items] == ["calculator"]
    assert "precision" not in seen.items[0].parameters["properties"]
    assert client.agent_tools(name, categories=[]).left_out[0].name == "calculator"
    answer = client.call("calculator", {"expression": "1/3"}, agent_id=name)
    assert answer.data["value"] == 0.33
    changed = control.agents.update(name, description="Adds and divides.")
    assert (changed.description, changed.principals) == ("Adds and divides.", (mine,))
    assert control.agents.disable(name).is_enabled is False
    refused = client.call("calculator", {"expression": "1"}, agent_id=name)
    assert refused.error is not None
    assert control.agents.enable(name).is_enabled is True
    assert control.agents.unbind(name, "calculator") is None
    assert control.agents.bindings(name) == ()
    assert control.agents.delete(name) is None
    with pytest.raises(Refused) as caught:
        control.agents.show(name)
    assert caught.value.code == "RESOURCE_NOT_FOUND"
    assert control.changes()[0].action == "agent.delete"
    assert control.changes()[0].principal_id == "approver:owner"


@pytest.mark.row("R1", "D1")
def test_tools_are_registered_replaced_disabled_and_removed(
    kind: str, control: Any, client: Any
) -> None:
    name = f"weather_{kind}"
    document = {
        "name": name, "type": "REST", "description": "Get the weather.", "method": "GET",
        "endpoint": "https://weather.example/v1", "category": kind,
    }  # fmt: skip
    assert control.tools.add(document).source == "api"
    assert [tool.name for tool in client.tools(category=kind)] == [name]
    assert client.tools_and_sources(category=kind)[0][1] == "api"
    assert client.tools_page(category=kind, limit=1).pagination.total_count == 1
    changed = control.tools.replace(f"{name}@1.0.0", {**document, "description": "Get it."})
    assert changed.description == "Get it."
    assert client.tool(name).source == "api"
    assert [tool.is_active for tool in control.tools.disable(name)] == [False]
    assert [tool.is_active for tool in control.tools.enable(name)] == [True]
    assert control.tools.remove(f"{name}@1.0.0") is None
    assert client.tools(category=kind) == []
    with pytest.raises(Refused) as caught:
        control.tools.remove("calculator@1.0.0")
    assert caught.value.code == "PERMISSION_DENIED"


@pytest.mark.row("D6", "D1")
def test_calls_are_listed_and_found_by_id(kind: str, client: Any) -> None:
    made = client.call("calculator", {"expression": "1"}, trace_id=f"logged-{kind}")
    page = client.calls(tool="calculator", limit=1)
    assert page.items[0].call_id == made.metadata.call_id
    assert client.call_record(made.metadata.call_id).trace_id == f"logged-{kind}"
    with pytest.raises(Refused) as caught:
        client.call_record("call_0")
    assert caught.value.code == "RESOURCE_NOT_FOUND"


@pytest.mark.row("D4", "D1")
def test_token_is_created_used_and_revoked(
    kind: str, control: Any, administered_daemon: Daemon
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    made = control.tokens.new(f"robot-{kind}", agents=["clerk"], expires_at=later)
    assert (made.token.principal_id, made.token.expires_at) == (f"token:robot-{kind}", later)
    assert made.token in control.tokens.list()
    assert made.secret not in repr(made)
    with client_of(kind, administered_daemon.socket, credential=made.secret) as robot:
        assert robot.call("calculator", {"expression": "1"}).success
        assert control.tokens.revoke(made.token.id).is_valid is False
        refused = robot.call("calculator", {"expression": "1"})
        assert refused.error is not None
        assert refused.error.code == "UNAUTHORIZED"
        with pytest.raises(Refused):
            robot.tools()


@pytest.mark.row("D4", "D1")
def test_approver_is_added_and_removed(kind: str, control: Any) -> None:
    made = control.approvers.add(f"second-{kind}", scopes=["approve", "admin"])
    assert made.approver in control.approvers.list()
    assert made.secret not in repr(made)
    assert control.approvers.remove(f"second-{kind}").removed_at is not None
    assert made.approver not in control.approvers.list()


@pytest.mark.row("D4")
def test_control_client_without_admin_is_refused(
    kind: str, control: Any, administered_daemon: Daemon
) -> None:
    token = control.tokens.new(f"caller-{kind}").secret
    path = administered_daemon.control
    with client_of(kind, path, control=True, credential=token) as caller:
        with pytest.raises(Refused) as caught:
            caller.agents.list()
        assert caught.value.code == "PERMISSION_DENIED"
        assert caller.health().status == "ok"


@pytest.mark.row("D1", "D6")
@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_client_reconnects_after_a_daemon_restart(
    kind: str, start_daemon: StartDaemon, ending: str
) -> None:
    daemon = start_daemon()
    with client_of(kind, daemon.socket) as client:
        assert client.call("calculator", {"expression": "1 + 1"}).success
        if ending == "stop":
            assert daemon.stop() == 0
        else:
            daemon.process.kill()
            daemon.process.wait(timeout=30)
        with pytest.raises(DaemonUnavailable, match="fumehood serve") as caught:
            client.call("calculator", {"expression": "1 + 1"})
        assert caught.value.may_have_acted is False
        start_daemon()
        assert client.call("calculator", {"expression": "1 + 1"}).success
        assert client.ready().status == "ready"


@pytest.mark.row("D1")
def test_daemon_killed_during_a_call_is_reported_as_may_have_acted(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(log_level="debug")
    raised: list[DaemonUnavailable] = []

    def call() -> None:
        with Client(daemon.socket) as client:
            try:
                arguments = {"expression": SLOW}
                client.call("calculator", arguments, timeout_seconds=LONG_ENOUGH_S)
            except DaemonUnavailable as error:
                raised.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: "call.intent" in daemon.log)
    daemon.process.kill()
    daemon.process.wait(timeout=30)
    caller.join(timeout=30)
    assert raised[0].may_have_acted is True
    assert "unknown whether" in str(raised[0])


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

"""D3: the engine's tools in Model Context Protocol clients, through the official library."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from conftest import Daemon, StartDaemon, make_first_approver, running_daemon
from support.approving import approving_daemon, ran
from support.authority import Authority, ask
from support.definition_files import DefinitionDirectory, definition_directory
from support.definitions import rest_document
from support.mcp import MODES, PATIENCE_S, WAYS, connected, decide, raw_client
from support.network import free_port
from support.wait import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.row("D3")]

both_eras = pytest.mark.parametrize("mode", MODES)
both_ways = pytest.mark.parametrize("way", WAYS)
OWN = ["list_tools", "run_tool"]


@both_ways
@both_eras
async def test_mcp_client_lists_and_calls_tools(shared_daemon: Daemon, way: str, mode: str) -> None:
    async with connected(shared_daemon, way, mode) as client:
        assert client.server_info.name == "fumehood"
        assert client.protocol_version == ("2025-11-25" if mode == "legacy" else "2026-07-28")
        listed = (await client.list_tools()).tools
        names = [tool.name for tool in listed]
        assert names == [*sorted(names[:-2]), *OWN]  # workspace tools need a session
        assert "calculator" in names
        assert "read_file" not in names
        sums = listed[0]
        assert sums.annotations.read_only_hint is True
        assert sums.output_schema is not None
        result = await client.call_tool("calculator", {"expression": "5! + 2**10"})
        assert (result.is_error, result.structured_content) == (
            False,
            {"value": 1144, "text": "1144"},
        )
        assert isinstance(result.content[0], types.TextContent)
        assert json.loads(result.content[0].text) == result.structured_content
        envelope = result.meta["fumehood/envelope"]
        record = ask(shared_daemon.socket, "GET", f"/v1/calls/{envelope['metadata']['call_id']}")
        assert record.body["data"]["call"]["code"] == "OK"


@both_ways
@both_eras
async def test_tool_failures_are_error_results_with_code_and_output(
    shared_daemon: Daemon, way: str, mode: str
) -> None:
    async with connected(shared_daemon, way, mode) as client:
        for name, arguments, words in (
            ("calculator", {"expression": "1 / 0"}, "EXECUTION_ERROR: "),
            ("calculator", {"expression": "a.b"}, "SANDBOX_VIOLATION: "),
            ("calculator", {}, "INVALID_PARAMS: "),
            ("calculater", {}, "TOOL_NOT_FOUND: There is no tool 'calculater'. Did you mean"),
            ("run_restricted_python", {"code": "print('so far')\n{}['a']"}, "EXECUTION_ERROR: "),
        ):
            result = await client.call_tool(name, arguments)
            assert result.is_error is True
            assert isinstance(result.content[0], types.TextContent)
            assert result.content[0].text.startswith(words), result.content[0].text
        assert "traceback:\n" in result.content[0].text
        assert "stdout:\nso far" in result.content[0].text
        twin = await client.call_tool("calculator", {"expression": "1", "precision": None})
        assert twin.structured_content == {"value": 1, "text": "1"}


@both_ways
@both_eras
async def test_long_output_is_truncated_and_readable_through_resource_link(
    shared_daemon: Daemon, way: str, mode: str
) -> None:
    async with connected(shared_daemon, way, mode) as client:
        result = await client.call_tool("run_restricted_python", {"code": "print('é' * 5000)"})
        assert len(result.structured_content["stdout"]) <= 2000
        _, link = result.content
        assert isinstance(link, types.ResourceLink)
        (whole,) = (await client.read_resource(link.uri)).contents
        assert isinstance(whole, types.TextResourceContents)
        assert whole.text == "é" * 5000 + "\n"
        with pytest.raises(Exception, match="address of a blob"):
            await client.read_resource("fumehood:///v1/blobs/none")
        with pytest.raises(Exception, match="no such blob"):
            await client.read_resource(link.uri[:-1] + ("0" if link.uri[-1] != "0" else "1"))


@both_eras
async def test_list_tools_and_run_tool_find_and_call_other_tools(
    shared_daemon: Daemon, mode: str
) -> None:
    async with connected(shared_daemon, "stdio", mode) as client:
        found = await client.call_tool("list_tools", {"query": "Mathematical EXPRESSION"})
        assert [tool["name"] for tool in found.structured_content["tools"]] == ["calculator"]
        call = {"name": "calculator", "arguments": {"expression": "6 * 7"}}
        assert (await client.call_tool("run_tool", call)).structured_content["value"] == 42
        again = await client.call_tool("run_tool", {"name": "run_tool", "arguments": call})
        assert again.is_error is True


@pytest.fixture(scope="module")
def changing() -> Iterator[tuple[Daemon, DefinitionDirectory]]:
    """A daemon, and the directory from which it loads tools."""
    with (
        definition_directory() as directory,
        running_daemon(tools_directory=str(directory.path)) as daemon,
    ):
        yield daemon, directory


@both_ways
@both_eras
async def test_changed_tool_list_notifies_client_and_is_relisted(
    changing: tuple[Daemon, DefinitionDirectory], way: str, mode: str
) -> None:
    daemon, definitions = changing
    weather = f"weather_{way}_{mode}"
    told = asyncio.Event()

    async def on_message(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            told.set()

    async with connected(daemon, way, mode, message_handler=on_message) as client:
        assert weather not in [tool.name for tool in (await client.list_tools()).tools]
        if mode == "legacy":
            # The stream of changes may not be open yet: changes go on until one is told.
            number = 0
            async with asyncio.timeout(PATIENCE_S):
                while not told.is_set():
                    number += 1
                    document = rest_document(name=weather, description=f"Number {number}.")
                    definitions.put("tools.json", {"tools": [document]})
                    await asyncio.wait([asyncio.create_task(told.wait())], timeout=2)
        else:
            async with client.listen(tools_list_changed=True) as changes:
                definitions.put("tools.json", {"tools": [rest_document(name=weather)]})
                async with asyncio.timeout(PATIENCE_S):
                    await anext(aiter(changes))
        assert weather in [tool.name for tool in (await client.list_tools()).tools]


@pytest.fixture(scope="module")
def asking() -> Iterator[Daemon]:
    """A daemon with dangerous tools and an approver."""
    with approving_daemon() as daemon:
        yield daemon


@both_ways
@both_eras
@pytest.mark.parametrize(
    ("decision", "action", "code"),
    [
        ("approve", "accept", None),
        ("deny", "accept", "APPROVAL_DENIED"),
        (None, "accept", "REQUIRES_HUMAN_APPROVAL"),
        (None, "decline", "REQUIRES_HUMAN_APPROVAL"),
        ("approve", "cancel", "REQUIRES_HUMAN_APPROVAL"),
        ("approve", "accept without looking", "REQUIRES_HUMAN_APPROVAL"),
    ],
)
async def test_elicitation_accept_rechecks_approval_without_granting_it(
    asking: Daemon, way: str, mode: str, decision: str | None, action: Any, code: str | None
) -> None:
    text = f"{way} {mode} {decision} {action}"
    asked: list[str] = []

    async def elicit(_: Any, params: Any) -> types.ElicitResult:
        asked.append(params.message)
        if decision is not None:
            reason = "not today" if decision == "deny" else None
            await asyncio.to_thread(decide, asking, params.message, decision, reason)
        # Each client shows a form of booleans.
        assert {each["type"] for each in params.requested_schema["properties"].values()} == {
            "boolean"
        }
        name, _, is_left = action.partition(" ")
        content: dict[str, Any] = {"look": False} if is_left else {}
        return types.ElicitResult(action=name, content=content if name == "accept" else None)

    async with connected(asking, way, mode, elicitation_callback=elicit) as client:
        result = await client.call_tool("note", {"text": text})
    assert len(asked) == 1
    assert "The call of note waits for approval apr_" in asked[0]
    if decision == "approve":
        wait_until(lambda: f"'{text}' 1" in ran(asking))
    assert ran(asking).count(f"'{text}' 1") == (decision == "approve")
    assert isinstance(result.content[0], types.TextContent)
    if code is None:
        assert result.structured_content == {"noted": text}
    else:
        assert result.is_error is True
        assert result.content[0].text.startswith(f"{code}: ")
        assert ("not today" in result.content[0].text) is (decision == "deny")


@both_eras
async def test_client_without_elicitation_gets_approval_and_call_ids(
    asking: Daemon, mode: str
) -> None:
    async with connected(asking, "stdio", mode) as client:
        result = await client.call_tool("note", {"text": f"unasked {mode}"})
    assert isinstance(result.content[0], types.TextContent)
    text = result.content[0].text
    assert text.startswith("REQUIRES_HUMAN_APPROVAL: ")
    assert "apr_" in text
    assert "call_" in text
    assert f"'unasked {mode}' 1" not in ran(asking)


@both_ways
@both_eras
@pytest.mark.parametrize("is_followed", [False, True])
async def test_repeat_from_new_process_is_same_call_until_answer_is_fetched(
    asking: Daemon, way: str, mode: str, is_followed: bool
) -> None:
    text = f"repeated {way} {mode} {is_followed}"

    async def told(*_: Any) -> None:
        """A callback with which the client requests progress."""

    async def call() -> types.CallToolResult:
        async with connected(asking, way, mode) as client:
            more: dict[str, Any] = {"progress_callback": told} if is_followed else {}
            return await client.call_tool("note", {"text": text}, **more)

    first, again = words_of(await call()), words_of(await call())
    assert first == again
    await asyncio.to_thread(decide, asking, first, "approve")
    wait_until(lambda: f"'{text}' 1" in ran(asking))
    assert (await call()).structured_content == {"noted": text}
    assert ran(asking).count(f"'{text}' 1") == 1
    other = words_of(await call())
    assert other.startswith("REQUIRES_HUMAN_APPROVAL: ")
    assert other != first


def words_of(result: types.CallToolResult) -> str:
    """The first text of a result."""
    assert isinstance(result.content[0], types.TextContent)
    return result.content[0].text


async def test_wait_option_blocks_call_until_approval(asking: Daemon) -> None:
    async with connected(asking, "stdio", MODES[0], "--wait", "30") as client:
        task = asyncio.create_task(client.call_tool("note", {"text": "waited for"}))
        approvals: list[Any] = []

        def pending() -> bool:
            found = ask(asking.socket, "GET", "/v1/approvals?state=pending").body["data"]["items"]
            approvals[:] = [one for one in found if one["arguments"].get("text") == "waited for"]
            return bool(approvals)

        await asyncio.to_thread(wait_until, pending)
        await asyncio.to_thread(decide, asking, approvals[0]["id"], "approve")
        assert (await task).structured_content == {"noted": "waited for"}


@both_eras
async def test_agent_lists_and_calls_only_its_bound_tools(
    administered_daemon: Daemon, mode: str
) -> None:
    daemon, agent = administered_daemon, f"sums-{mode}"
    authority = Authority(daemon.home, daemon.credential)
    authority.agent(agent, f"uid:{os.getuid()}", tools=("calculator",))
    async with connected(daemon, "stdio", mode, "--agent", agent) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["calculator", *OWN]
        result = await client.call_tool("calculator", {"expression": "1"})
        assert result.structured_content["value"] == 1
        refused = await client.call_tool("run_restricted_python", {"code": "1"})
        assert refused.content[0].text.startswith("PERMISSION_DENIED: ")
        binding = f"/v1/agents/{agent}/tools/run_restricted_python"
        authority.do("PUT", binding, {"sort_order": -1})
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names == ["run_restricted_python", "calculator", *OWN]
        authority.do("DELETE", binding)
        assert [tool.name for tool in (await client.list_tools()).tools] == ["calculator", *OWN]
    async with connected(daemon, "http", mode, query="?agent_id=nobody") as client:
        with pytest.raises(Exception, match="RESOURCE_NOT_FOUND: There is no agent 'nobody'"):
            await client.list_tools()
        refused = await client.call_tool("calculator", {"expression": "1"})
        assert refused.content[0].text.startswith("RESOURCE_NOT_FOUND: ")


@both_eras
async def test_progress_notification_is_sent_for_started_call_only(
    asking: Daemon, mode: str
) -> None:
    told: list[tuple[float, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        assert total == 100
        told.append((progress, message))

    async with connected(asking, "stdio", mode) as client:
        call = {"expression": "1 + 1"}
        result = await client.call_tool("calculator", call, progress_callback=on_progress)
        refused = await client.call_tool("calculator", {}, progress_callback=on_progress)
    assert result.structured_content["value"] == 2
    assert refused.is_error is True
    assert told == [(0, "started")]


@both_eras
async def test_mcp_server_survives_daemon_crash_and_restart(
    start_daemon: StartDaemon, mode: str
) -> None:
    daemon = start_daemon()
    async with connected(daemon, "stdio", mode) as client:
        first = await client.call_tool("calculator", {"expression": "1"})
        daemon.process.kill()
        await asyncio.to_thread(daemon.process.wait)
        refused = await client.call_tool("calculator", {"expression": "2"})
        assert refused.is_error is True
        assert words_of(refused).startswith(f"No engine answers on {daemon.socket}. ")
        restarted = await asyncio.to_thread(start_daemon)
        second = await client.call_tool("calculator", {"expression": "3"})
        assert (first.structured_content["value"], second.structured_content["value"]) == (1, 3)
        assert [tool.name for tool in (await client.list_tools()).tools][-2:] == OWN
    assert restarted.stop() == 0


@both_eras
async def test_mcp_server_started_before_daemon_reports_it_and_connects_later(
    start_daemon: StartDaemon, mode: str
) -> None:
    daemon = start_daemon()
    assert daemon.stop() == 0
    told = asyncio.Event()

    async def on_message(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            told.set()

    options = ("--session", "new")
    async with connected(daemon, "stdio", mode, *options, message_handler=on_message) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == OWN
        refused = await client.call_tool("run_tool", {"name": "calculator"})
        assert refused.is_error is True
        said = f"No engine answers on {daemon.socket}. Start one with: fumehood serve"
        assert words_of(refused) == said
        await asyncio.to_thread(start_daemon)
        if mode == "legacy":  # its stream of changes is opened by itself
            async with asyncio.timeout(PATIENCE_S):
                await told.wait()
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert "write_file" in tools
        assert tools["calculator"].output_schema is not None  # as in the version agreed on before


async def test_call_interrupted_by_daemon_crash_reports_unknown_effect(
    start_daemon: StartDaemon, home: Path
) -> None:
    daemon = start_daemon()
    with raw_client(daemon) as raw:
        raw.initialize()
        raw.call(1, "run_restricted_python", code="n = 0\nwhile True: n = n + 1")
        wait_until(lambda: daemon.process.poll() is None and _is_running(daemon))
        daemon.process.kill()
        answer = raw.receive()
    assert (answer["id"], answer["error"]["code"]) == (1, -32603)
    assert "unknown whether the call took effect" in answer["error"]["message"]


def _is_running(daemon: Daemon) -> bool:
    """Whether a child process of the daemon uses CPU time."""
    import psutil

    children = psutil.Process(daemon.process.pid).children(recursive=True)
    return any(child.cpu_times().user > 0.2 for child in children)


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
@both_eras
async def test_stdio_server_session_has_file_tools_and_ends_with_the_process(
    shared_daemon: Daemon, mode: str
) -> None:
    def active() -> list[str]:
        items = ask(shared_daemon.socket, "GET", "/v1/sessions").body["data"]["items"]
        return [item["id"] for item in items if item["state"] == "active"]

    before = active()
    async with connected(shared_daemon, "stdio", mode, "--session", "new") as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert {"read_file", "write_file", "list_files"} <= set(names)
        assert active() == before  # the first call makes it
        await client.call_tool("run_python", {"code": "x = 40"})
        (made,) = set(active()) - set(before)
        result = await client.call_tool("run_python", {"code": "x + 2"})
        assert result.structured_content["value"] == 42
        assert result.structured_content["session"]["id"] == made
        ask(shared_daemon.socket, "DELETE", f"/v1/sessions/{made}")
        lost = await client.call_tool("run_python", {"code": "x + 2"})
        assert words_of(lost).startswith("RESOURCE_NOT_FOUND: The session has ended; ")
        result = await client.call_tool("run_python", {"code": "40 + 2"})
        assert result.structured_content["value"] == 42
        again = result.structured_content["session"]["id"]
        missing = await client.call_tool("read_file", {"path": "none"})
        assert "session has ended" not in words_of(missing)
        assert again in active()
    wait_until(lambda: not {made, again} & set(active()))


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
@both_eras
async def test_http_clients_get_separate_sessions_that_end_with_the_client(
    shared_daemon: Daemon, mode: str
) -> None:
    sessions = "/v1/sessions"
    async with (
        connected(shared_daemon, "http", mode, query="?session_id=new") as client,
        connected(shared_daemon, "http", mode, query="?session_id=new") as other,
    ):
        assert "write_file" in [tool.name for tool in (await client.list_tools()).tools]
        await client.call_tool("run_python", {"code": "x = 40"})
        result = await client.call_tool("run_python", {"code": "x + 2"})
        assert result.structured_content["value"] == 42
        own = result.structured_content["session"]["id"]
        assert "NameError" in words_of(await other.call_tool("run_python", {"code": "x"}))
        found = await asyncio.to_thread(ask, shared_daemon.socket, "GET", f"{sessions}/{own}")
        assert found.body["data"]["session"]["state"] == "active"
    wait_until(
        lambda: (
            ask(shared_daemon.socket, "GET", f"{sessions}/{own}").body["data"]["session"]["state"]
            == "ended"
        )
    )


async def test_new_session_requires_initialize_and_forged_session_id_is_refused(
    shared_daemon: Daemon,
) -> None:
    query = "?session_id=new"
    async with connected(shared_daemon, "http", "2026-07-28", query=query) as client:
        with pytest.raises(MCPError, match="needs a version with initialize"):
            await client.list_tools()
    client = shared_daemon.client()
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    json_type = {"content-type": "application/json"}
    number = "0" * 32  # its form alone makes nobody the owner of a session
    forged = {"mcp-session-id": f"2025-11-25.plain.sess_{number}"}
    for session in ({}, {"mcp-session-id": f"2025-11-25.plain.{number}"}, forged):
        raw = json.dumps(message).encode()
        assert client.request("POST", f"/mcp{query}", raw, json_type | session).status == 404
    assert client.request("DELETE", f"/mcp{query}", None, forged).status == 204


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
@both_eras
async def test_program_reports_monotonic_progress_and_ends_on_cancellation(
    shared_daemon: Daemon, mode: str
) -> None:
    told: list[tuple[float, str | None]] = []
    half = asyncio.Event()

    async def on_progress(progress: float, _: float | None, message: str | None) -> None:
        told.append((progress, message))
        if progress == 50:
            half.set()

    code = "import time\nprogress(50, 'half')\nprogress(20, 'back')\ntime.sleep(60)"
    async with connected(shared_daemon, "stdio", mode, read_timeout_seconds=60) as client:
        task = asyncio.create_task(
            client.call_tool("run_python", {"code": code}, progress_callback=on_progress)
        )
        async with asyncio.timeout(PATIENCE_S):
            await half.wait()
        task.cancel()
        await asyncio.wait([task])
        wait_until(lambda: _newest_code(shared_daemon, "run_python") == "CANCELLED")
    assert told == [(0, "started"), (50, "half")]


def _newest_code(daemon: Daemon, tool: str) -> str:
    items = ask(daemon.socket, "GET", f"/v1/calls?tool={tool}&limit=1").body["data"]["items"]
    return items[0]["code"] if items else ""


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[tuple[int, str]]:
    """The port of a daemon, and the token `desk`."""
    port = free_port()
    with running_daemon(approver=True, tcp=f"127.0.0.1:{port}") as daemon:
        yield port, Authority(daemon.home, daemon.credential).token("desk")


@both_eras
async def test_token_client_calls_over_loopback_tcp_without_control_routes(
    over_tcp: tuple[int, str], mode: str
) -> None:
    port, token = over_tcp
    headers = {"authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http:
        address = streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http)
        async with Client(address, mode=mode) as client:
            result = await client.call_tool("calculator", {"expression": "2 + 2"})
            assert result.structured_content["value"] == 4
        calls = await http.get(f"http://localhost:{port}/v1/calls?limit=1")
        assert calls.json()["data"]["items"][0]["principal_id"] == "token:desk"
        control = await http.get(f"http://127.0.0.1:{port}/v1/agents")
        assert control.status_code == 404


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
async def test_stdio_server_with_a_preset_has_its_session_or_runs_nothing(
    start_daemon: StartDaemon,
) -> None:
    presets = {"small": {"memory_mb": 128, "env": {"A": "1"}}, "gone": {"image": "gone"}}
    daemon = start_daemon(presets=json.dumps(presets))

    def states() -> list[tuple[str | None, str]]:
        items = ask(daemon.socket, "GET", "/v1/sessions").body["data"]["items"]
        return [(item["preset"], item["state"]) for item in items]

    async with connected(daemon, "stdio", MODES[0], "--preset", "small") as client:
        code = {"code": "import os; os.environ['A']"}
        result = await client.call_tool("run_python", code)
        assert result.structured_content["value"] == "1"
        assert states() == [("small", "active")]
    wait_until(lambda: states() == [("small", "ended")])
    for name, said in (("smal", "INVALID_PARAMS: "), ("gone", "SANDBOX_UNAVAILABLE: ")):
        async with connected(daemon, "stdio", MODES[0], "--preset", name) as client:
            refused = await client.call_tool("run_python", {"code": "1"})
            assert refused.is_error is True
            assert words_of(refused).startswith(said)
    assert states() == [("small", "ended")]


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
async def test_stdio_server_with_a_project_works_on_a_copy_until_its_changes_are_approved(
    home: Path, start_daemon: StartDaemon
) -> None:
    project = home / "shop"
    project.mkdir()
    file = project / "shop.py"
    file.write_text("total = max\n")
    credential = make_first_approver(home)
    presets = {"small": {"memory_mb": 128}}
    daemon = start_daemon(presets=json.dumps(presets), container__images__shell="python")
    daemon.credential = credential

    options = ("--project", str(project), "--preset", "small")
    async with connected(daemon, "stdio", MODES[0], *options) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"run_shell", "workspace_diff", "apply_workspace", "start_process"} <= names
        edit = {"command": "sed -i s/max/sum/ shop.py && cat shop.py"}
        edited = await client.call_tool("run_shell", edit)
        assert edited.structured_content["stdout"] == "total = sum\n"
        (record,) = ask(daemon.socket, "GET", "/v1/sessions").body["data"]["items"]
        assert (record["state"], record["preset"]) == ("active", "small")
        shown = (await client.call_tool("workspace_diff", {})).structured_content
        assert "-total = max\n+total = sum\n" in shown["diff"]
        asked = await client.call_tool("apply_workspace", {})
        assert words_of(asked).startswith("REQUIRES_HUMAN_APPROVAL: ")
        assert file.read_text() == "total = max\n"
        await asyncio.to_thread(decide, daemon, words_of(asked), "approve")
        applied = await client.call_tool("apply_workspace", {})
        assert applied.is_error is False, words_of(applied)
        assert file.read_text() == "total = sum\n"
    assert [path.name for path in project.iterdir()] == ["shop.py"]
    for directory, preset, said in (
        (home / "none", "small", f"{home}/none cannot be used: "),
        (project, "none", "INVALID_PARAMS: "),
    ):
        options = ("--project", str(directory), "--preset", preset)
        async with connected(daemon, "stdio", MODES[0], *options) as client:
            refused = await client.call_tool("calculator", {"expression": "1"})
            assert refused.is_error is True
            assert words_of(refused).startswith(said)
    assert [path.name for path in project.iterdir()] == ["shop.py"]
    items = ask(daemon.socket, "GET", "/v1/sessions").body["data"]["items"]
    wait_until(lambda: [one["id"] for one in items] == [record["id"]])


async def test_refused_session_is_reported_and_skipped_without_containers(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(sessions__max="0")
    async with connected(daemon, "stdio", MODES[0], "--session", "new") as client:
        refused = await client.call_tool("calculator", {"expression": "6 * 7"})
        assert words_of(refused).startswith("QUOTA_EXCEEDED: ")
    daemon.stop()
    variables = {"DOCKER_HOST": f"unix://{daemon.home}/none.sock"}
    without = await asyncio.to_thread(start_daemon, variables=variables)
    async with connected(without, "stdio", MODES[0], "--session", "new") as client:
        result = await client.call_tool("calculator", {"expression": "6 * 7"})
        assert result.structured_content["value"] == 42


def test_raw_stdio_client_initializes_and_ends_cleanly(shared_daemon: Daemon) -> None:
    with raw_client(shared_daemon) as raw:
        assert raw.initialize()["serverInfo"]["name"] == "fumehood"
        assert raw.end() == 0


@pytest.mark.row("D3")
def test_terminated_stdio_server_exits_zero_with_empty_stderr(shared_daemon: Daemon) -> None:
    with raw_client(shared_daemon) as raw:
        raw.initialize()
        raw.process.terminate()
        _, errors = raw.process.communicate(timeout=PATIENCE_S)
        assert (raw.process.returncode, errors) == (0, b"")

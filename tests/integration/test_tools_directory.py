"""A real daemon with a tool definition directory that changes while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon
from fumehood import Client, Config, Engine
from fumehood.core.errors import InvalidParams
from fumehood.definition_files.in_engine import DefinitionFiles
from fumehood.registry.index import ToolFilter
from support.definition_files import DefinitionDirectory
from support.definitions import rest_document
from support.http import SocketClient
from support.wait import DEADLINE_S, wait_until

BUILT_IN = [
    "apply_workspace", "calculator", "delete_files", "fetch_url", "list_files", "list_processes",
    "read_file", "read_process", "run_javascript", "run_python", "run_restricted_python",
    "run_shell", "search_web", "start_process", "stop_process", "workspace_diff", "write_file",
    "write_process",
]  # fmt: skip


@pytest.fixture
def daemon(start_daemon: StartDaemon, definitions: DefinitionDirectory) -> Daemon:
    return start_daemon(tools_directory=str(definitions.path))


def run(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(FUMEHOOD), *arguments], env=daemon.environment, capture_output=True, timeout=600
    )


def _names(client: SocketClient, query: str = "limit=100") -> list[str]:
    answer = client.get(f"/v1/tools?{query}")
    assert answer.status == 200, answer.body
    return [item["name"] for item in answer.body["data"]["items"]]


def _ids(client: SocketClient) -> list[str]:
    return [item["id"] for item in client.get("/v1/tools?limit=100").body["data"]["items"]]


def _log(daemon: Daemon, event: str) -> list[dict[str, Any]]:
    lines = [line for line in daemon.log.splitlines() if line.startswith("{")]
    return [line for line in map(json.loads, lines) if line["event"] == event]


@pytest.mark.row("R1", "R4", "T5", "S1")
def test_definition_changes_reach_a_connected_client_without_restart(
    daemon: Daemon, definitions: DefinitionDirectory
) -> None:
    client = daemon.client()
    assert "weather" not in _names(client)
    definitions.put("weather.json", rest_document())
    wait_until(lambda: "weather" in _names(client))
    definitions.put("weather.json", rest_document(version="1.1.0"))
    wait_until(lambda: "weather@1.1.0" in _ids(client))
    definitions.put("more.yaml", b"{name: stars, type: MCP, description: Look at stars.}\n")
    wait_until(lambda: "stars" in _names(client))
    answer = client.call("stars")  # of no MCP server
    assert (answer.status, answer.code) == (503, "SANDBOX_UNAVAILABLE")
    assert answer.body["error"]["retryable"] is False
    assert "No MCP server of the configuration" in answer.body["error"]["message"]
    definitions.remove("weather.json")
    wait_until(lambda: "weather" not in _names(client))
    assert client.get("/v1/tools/weather").code == "TOOL_NOT_FOUND"
    assert "stars" in _names(client)


@pytest.mark.row("R4", "D7")
def test_faulty_definition_file_is_logged_once_per_change_and_others_are_served(
    daemon: Daemon, definitions: DefinitionDirectory
) -> None:
    client = daemon.client()
    definitions.put("bad.json", b"[")
    definitions.put("good.json", rest_document(name="good"))
    wait_until(lambda: "good" in _names(client) and _log(daemon, "tools_directory.left_out"))
    descriptors = f"/proc/{daemon.process.pid}/fd"
    before = len(os.listdir(descriptors))
    definitions.put("other.json", rest_document(name="other"))
    wait_until(lambda: "other" in _names(client))
    definitions.put("bad.json", b"[[")
    definitions.put("third.json", rest_document(name="third"))
    wait_until(lambda: "third" in _names(client))
    wait_until(lambda: len(_log(daemon, "tools_directory.left_out")) == 2)
    wait_until(lambda: len(os.listdir(descriptors)) <= before)  # no reload leaks one
    files = [event["file"] for event in _log(daemon, "tools_directory.left_out")]
    reasons = [event["reason"] for event in _log(daemon, "tools_directory.left_out")]
    assert files == ["bad.json", "bad.json"]
    assert reasons == [
        "not JSON: Expecting value (line 1, column 2)",
        "not JSON: Expecting value (line 1, column 3)",
    ]
    findings = json.loads(run(daemon, "doctor").stdout)
    (bad,) = [f for f in findings if f["check"].startswith("tools directory")]
    assert (bad["check"], bad["verdict"]) == ("tools directory: bad.json", "warning")
    assert bad["found"] == reasons[-1]


@pytest.mark.row("E5", "R1", "D1")
def test_tool_list_is_paged_over_http_and_complete_in_client_and_command_line(
    start_daemon: StartDaemon, definitions: DefinitionDirectory
) -> None:
    names = [f"t{number:03}" for number in range(230)]
    definitions.put_tools("a.json", *names[:200], tags=["many"])
    definitions.put_tools("b.json", *names[200:], tags=["few"], category="last")
    daemon = start_daemon(tools_directory=str(definitions.path))
    client = daemon.client()
    first = client.get("/v1/tools").body["data"]
    assert len(first["items"]) == 10
    assert first["items"][0]["name"] == "apply_workspace"
    assert first["sources"]["apply_workspace"] == "builtin"
    everything = sorted([*BUILT_IN, *names])
    assert [item["name"] for item in first["items"]] == everything[:10]
    many = client.get("/v1/tools?tag=many").body["data"]
    assert many["sources"]["t000"] == "directory"
    assert first["pagination"]["has_more"] is True
    assert first["pagination"]["total_count"] == 230 + len(BUILT_IN)
    cursor = first["pagination"]["next_cursor"]
    assert _names(client, f"limit=3&cursor={cursor}") == everything[10:13]
    assert _names(client, "tag=few&limit=2") == ["t200", "t201"]
    assert _names(client, "category=last&type=REST&limit=1") == ["t200"]
    assert _names(client, "type=BUILTIN&limit=20") == BUILT_IN
    with Client(daemon.socket) as other:
        assert [tool.name for tool in other.tools()] == everything
        assert [tool.name for tool in other.tools(tag="few")] == names[200:]
    listed = json.loads(run(daemon, "tools", "list").stdout)
    assert [item["name"] for item in listed] == everything
    assert listed[everything.index("t000")]["source"] == "directory"
    few = json.loads(run(daemon, "tools", "list", "--tag", "few", "--type", "REST").stdout)
    assert [item["name"] for item in few] == names[200:]
    assert run(daemon, "tools", "list", "--type", "nothing").returncode == 1


@pytest.mark.row("R1")
def test_directory_change_is_atomic_for_concurrent_readers(
    daemon: Daemon, definitions: DefinitionDirectory
) -> None:
    """Two tools of one file must always appear together."""
    client, writer_done = daemon.client(), threading.Event()

    def write() -> None:
        other = daemon.client()
        for generation in range(2):
            pair = [f"p{generation}a", f"p{generation}b"]
            definitions.put_tools("pair.json", *pair)
            wait_until(lambda pair=pair: set(pair) <= set(_names(other)))
        writer_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not writer_done.is_set():
        seen.add(
            tuple(name for name in _names(client) if name.startswith("p"))
        )  # none of ours does
        assert client.calculate("1 + 1").body["success"]
    writer.join(timeout=DEADLINE_S)
    assert seen <= {(), *((f"p{n}a", f"p{n}b") for n in range(2))}
    assert len(seen) >= 2


@pytest.mark.anyio
@pytest.mark.row("R4")
async def test_embedded_engine_watches_the_directory_while_entered(
    home: Path, definitions: DefinitionDirectory
) -> None:
    definitions.put_tools("a.json", "a")
    engine = Engine(config=Config(home=home, tools_directory=definitions.path))
    assert engine.tool("a").source == "directory"
    async with engine:
        definitions.put("b.json", b"{")
        with anyio.fail_after(DEADLINE_S):
            while not engine.part(DefinitionFiles).faults:
                await anyio.sleep(0.01)
        assert engine.part(DefinitionFiles).faults[0].file == "b.json"
        assert [tool.name for tool in engine.tools()] == ["a", *BUILT_IN]
        page = engine.tools_page(filter_by=ToolFilter(tag="none"))
        assert page.pagination == {"has_more": False, "next_cursor": None, "total_count": 0}
        with pytest.raises(InvalidParams):
            engine.tools_page(cursor="x")

"""The server over an engine without a daemon: which tools are listed, and how often that is work."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine, progress, tool
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal, Scope
from fumehood.mcp.server.dispatch import Client, McpServer, result_of
from fumehood.mcp.server.messages import HANDSHAKES, MODERN, RpcError
from fumehood.testing import FakeWall
from support.answers import envelope_bytes
from support.asking import Deeds, asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("D3")]

CALLER = Principal("uid:1000", frozenset({Scope.CALL}))
NEW = Client(CALLER, MODERN, False)


class Sent:
    """A request whose messages are kept."""

    def __init__(self) -> None:
        self.on_cancel: Callable[[], bool] | None = None
        self.messages: list[Any] = []

    async def send(self, message: bytes) -> None:
        self.messages.append(json.loads(message))

    def cancel(self) -> None:
        raise AssertionError("nobody cancels")


@tool(sandboxed=False)
async def list_tools() -> str:
    """A tool with the name of one of the server's own."""
    return "mine"


@tool(sandboxed=False, requires_auth=True)
async def payroll() -> str:
    """Needs a token."""
    return "paid"


@tool(sandboxed=False)
async def count() -> str:
    """Count."""
    for number in range(1, 4):
        progress(number, "on")
    progress(2, "back")
    return "counted"


@tool(sandboxed=False)
async def leak() -> str:
    """Report a secret."""
    progress(50, "key ghp_" + "a1B2" * 9)
    return "leaked"


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[Engine]:
    config = Config(home=home)
    async with Engine(
        [list_tools, payroll, count, leak], config=config, interpreter=FakeWall()
    ) as running:
        yield running


async def ask(
    server: McpServer, client: Client, method: str, sent: Sent | None = None, **params: Any
) -> Any:
    """The result of one request."""
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return json.loads(await server.answer(request, client, sent or Sent()))["result"]


async def names(server: McpServer, client: Client = NEW) -> list[str]:
    return [tool["name"] for tool in (await ask(server, client, "tools/list"))["tools"]]


async def test_tool_list_has_a_stable_order(engine: Engine) -> None:
    server = McpServer(engine)
    found = await names(server)
    assert found[:-2] == sorted(found[:-2])
    assert found.count("list_tools") == 1
    assert "payroll" not in found
    assert "fetch_url" not in found  # the configuration has not enabled it
    assert not {"read_file", "write_file"} & set(found)
    with_token = replace(NEW, principal=replace(CALLER, token_id="t"))
    assert "payroll" in await names(server, with_token)
    in_session = await names(server, replace(NEW, session_id="sess_1"))
    assert {"read_file", "write_file", "list_files"} <= set(in_session)


async def test_descriptions_omit_parameters_unavailable_to_the_model(engine: Engine) -> None:
    server = McpServer(engine)

    async def told(client: Client) -> dict[str, str]:
        listed = await ask(server, client, "tools/list")
        found = await ask(server, client, "tools/call", name="list_tools", arguments={})
        assert "session_id" not in json.dumps([listed, found])
        return {tool["name"]: tool["description"] for tool in listed["tools"]}

    without = await told(NEW)
    kept = await told(replace(NEW, session_id="sess_1"))
    for name in ("run_python", "run_shell", "run_javascript"):
        assert "Nothing is kept for the next call." in without[name]
        assert "For the next call the session keeps " in kept[name]
        assert "session" not in without[name]
        assert "Nothing is kept" not in kept[name]


async def test_tool_shadowed_by_a_server_tool_is_callable_by_name(engine: Engine) -> None:
    server = McpServer(engine)
    result = await ask(server, NEW, "tools/call", name="run_tool", arguments={"name": "list_tools"})
    assert result["structuredContent"] == {"value": "mine"}


@pytest.mark.parametrize("version", HANDSHAKES)
async def test_older_protocol_versions_omit_newer_fields(engine: Engine, version: str) -> None:
    client = replace(NEW, version=version)
    server = McpServer(engine)
    begun = await ask(server, client, "initialize", protocolVersion=version)
    assert begun["protocolVersion"] == version
    assert begun["capabilities"]["tools"] == {"listChanged": True}
    listed = await ask(server, client, "tools/list")
    assert listed.keys() == {"tools"}
    has_output = any("outputSchema" in tool for tool in listed["tools"])
    assert has_output is (version >= "2025-06-18")
    assert await ask(server, client, "ping") == {}


async def test_newest_protocol_version_has_its_fields(engine: Engine) -> None:
    server = McpServer(engine)
    found = await ask(server, NEW, "server/discover")
    assert found["supportedVersions"][0] == MODERN
    for method in ("server/discover", "tools/list", "resources/list"):
        result = await ask(server, NEW, method)
        assert (result["resultType"], result["ttlMs"], result["cacheScope"]) == (
            "complete", 0, "private",
        )  # fmt: skip
        assert result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "fumehood"
    for method in ("ping", "initialize"):
        with pytest.raises(RpcError, match="no method"):
            await ask(server, NEW, method)


@pytest.mark.parametrize(
    ("token", "told"),
    [("x" * 200, True), (7, True), ("x" * 201, False), (True, False), (None, False)],
)
async def test_long_progress_token_is_refused(engine: Engine, token: Any, told: bool) -> None:
    """One request of 7 MB had an answer of gigabytes."""
    sent, meta = Sent(), {"progressToken": token}
    result = await ask(
        McpServer(engine), NEW, "tools/call", sent, name="count", arguments={}, _meta=meta
    )
    assert result["structuredContent"] == {"value": "counted"}
    tokens = [one["params"]["progressToken"] for one in sent.messages]
    assert (len(tokens) >= 3, set(tokens)) == ((True, {token}) if told else (False, set()))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("count", [(0, "started"), (1, "on"), (2, "on"), (3, "on")]),
        ("leak", [(0, "started"), (50, "key [redacted]")]),
        ("payroll", []),  # it is refused
    ],
)
async def test_progress_is_sent_in_order_and_redacted(
    engine: Engine, name: str, told: list[tuple[float, str]]
) -> None:
    sent = Sent()
    meta = {"progressToken": 1}
    await ask(McpServer(engine), NEW, "tools/call", sent, name=name, arguments={}, _meta=meta)
    params = [one["params"] for one in sent.messages]
    assert [(one["progress"], one["message"]) for one in params] == told


@pytest.mark.parametrize(("request_id", "is_cancelled"), [(1, True), (True, False), ("1", False)])
async def test_cancellation_ends_only_the_request_with_its_id(
    engine: Engine, request_id: Any, is_cancelled: bool
) -> None:
    client = replace(NEW, session="s")
    cancelled = []

    class Cancelling(Sent):
        async def send(self, message: bytes) -> None:
            params = {"requestId": request_id}
            server.take({"method": "notifications/cancelled", "params": params}, client)

        def cancel(self) -> None:
            cancelled.append(self)

    server = McpServer(engine)
    meta = {"progressToken": 1}
    await ask(server, client, "tools/call", Cancelling(), name="count", arguments={}, _meta=meta)
    assert bool(cancelled) is is_cancelled


@pytest.mark.parametrize("ends_first", [False, True])
async def test_repeated_approved_call_waits_for_its_running_call(ends_first: bool) -> None:
    """A client that gives up meanwhile ends nothing, and finds the answer with its next try."""
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        server = McpServer(desk.engine)
        await desk.decide(await desk.parked("a"))
        await deeds.begun.wait()

        async def repeat() -> Any:
            arguments = {"what": "a"}
            return await ask(server, NEW, "tools/call", name="erase", arguments=arguments)

        impatient, patient = asyncio.create_task(repeat()), asyncio.create_task(repeat())
        done, _ = await asyncio.wait([impatient, patient], timeout=0.2)
        assert not done
        impatient.cancel()
        await asyncio.wait([impatient])
        if ends_first:
            patient.cancel()
            await asyncio.wait([patient])
        deeds.gate.set()
        result = await (repeat() if ends_first else patient)
        assert result["structuredContent"] == {"erased": "a"}
        assert deeds.done == ["a"]


# -- Envelopes as results: content for a model, data for a program, links ------------


PICTURE = base64.b64encode(b"\x89PNG").decode()
BLOB = "/v1/blobs/blob_" + "0" * 32 + "?expires=1&signature=" + "f" * 64


def result(data: Any = None, error: Any = None) -> dict[str, Any]:
    document = json.loads(envelope_bytes({}))
    document |= {"data": data or {}, "error": error, "success": error is None}
    document["metadata"]["call_id"] = "call_1"
    document["status"] = "success" if error is None else "error"
    return result_of(Envelope.model_validate(document))


def failure(**details: Any) -> dict[str, Any]:
    return {
        "code": "EXECUTION_ERROR", "message": "It failed.", "retryable": False,
        "human_review": False, "details": details,
    }  # fmt: skip


def test_mcp_result_has_structured_content_and_equal_text() -> None:
    found = result({"value": 7, "text": "sieben · 7"})
    assert found["structuredContent"] == {"value": 7, "text": "sieben · 7"}
    assert found["isError"] is False
    (text,) = found["content"]
    assert json.loads(text["text"]) == found["structuredContent"]
    assert "sieben · 7" in text["text"]  # a model reads characters, not escapes
    stamped = found["_meta"]["fumehood/envelope"]
    assert stamped["success"] is True
    assert "data" not in stamped


def test_figure_is_an_image_block_and_not_in_the_text() -> None:
    figure = {"filename": "a.png", "content_type": "image/png", "content_base64": PICTURE}
    found = result({"stdout": "", "images": [figure]})
    text, image = found["content"]
    assert image == {"type": "image", "data": PICTURE, "mimeType": "image/png"}
    assert PICTURE not in text["text"]
    assert found["structuredContent"]["images"] == [figure]
    assert result(error=failure(images=[figure]))["content"][1] == image


def test_blobs_are_resource_links() -> None:
    field = {"field": "stdout", "original_length": 9, "returned_length": 1, "resource_url": BLOB}
    file = {"filename": "big.csv", "content_type": "text/csv", "size": 9, "url": BLOB}
    found = result({"files": [file], "truncated": True, "truncation_info": {"fields": [field]}})
    assert [block["type"] for block in found["content"]] == ["text", *["resource_link"] * 2]
    assert found["content"][1] == {
        "type": "resource_link", "uri": f"fumehood://{BLOB}", "name": "big.csv",
        "mimeType": "text/csv",
    }  # fmt: skip


def test_traceback_on_stderr_is_not_repeated() -> None:
    exception = {"type": "KeyError", "message": "'a'", "line": 1, "traceback": "line 1, in f\n"}
    found = result(error=failure(exception=exception, stderr="warned\nline 1, in f\n"))
    assert found["content"][0]["text"].count("line 1, in f") == 1


@pytest.mark.parametrize(
    "data",
    [
        {"images": "none", "files": {"url": 1}, "truncation_info": []},
        {"images": [1, {"content_base64": 7, "content_type": "image/png"}], "files": [None]},
        {"truncation_info": {"fields": [{"resource_url": BLOB}, 3]}},
    ],
)
def test_malformed_file_entries_are_returned_as_plain_data(data: dict[str, Any]) -> None:
    found = result(data)
    assert found["structuredContent"] == data
    assert len(found["content"]) == 1

"""Calls of an MCP server's tools, without a server."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest

from fumehood.core.call import TraceParent
from fumehood.executors.around import Share
from fumehood.executors.base import CallHandle
from fumehood.executors.outcome import Outcome
from fumehood.mcp.client.executor import MAX_UNREAD, call_tool
from fumehood.observe.trace_context import context_of
from support.definitions import function_definition, registered

pytestmark = [pytest.mark.anyio, pytest.mark.row("D5")]


class Server:
    """A server with one answer and no network."""

    def __init__(self, result: Any) -> None:
        self._result = result
        self.asked: list[Any] = []

    async def call(self, name: str, arguments: Any, request: Any) -> Any:
        self.asked.append(request)
        return self._result

    def used(self) -> list[Share]:
        return []


async def called(server: Server, span: str = "") -> Outcome:
    run: Any = SimpleNamespace(
        tool=registered(function_definition()),
        arguments={},
        traceparent=span,
        handle=CallHandle(),
        limits=SimpleNamespace(wall_s=5, output_bytes=1000),
    )
    return await call_tool(run, server)  # type: ignore[arg-type]


async def test_mcp_request_carries_the_trace_context_of_the_call() -> None:
    span = context_of("mine", "call_1", TraceParent("a" * 32, "b" * 16, "01"))
    server = Server({"content": [{"type": "text", "text": "done"}]})
    outcome = await called(server, str(span))
    assert outcome.error is None
    assert server.asked[0].params == {"traceparent": f"00-{'a' * 32}-{span.span_id}-01"}


TEXT = {"type": "text", "text": "done"}
PICTURE = b"\x89PNG\xff\xfe" * 30
ENCODED = base64.b64encode(PICTURE).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"data": ENCODED},
        {"data": f"data:image/png;base64,{ENCODED}"},
        {"data": f"data:image/png;charset=x;BASE64,{ENCODED}", "mimeType": None},
        {"data": base64.encodebytes(PICTURE).decode()},
        {"data": ENCODED.replace("\n", "").rstrip("=") + "\r\n"},
        {"data": base64.urlsafe_b64encode(PICTURE).decode()},
    ],
    ids=["plain", "url", "url-only", "lines", "unpadded", "url-alphabet"],
)
async def test_file_in_any_usual_encoding_is_delivered(fields: dict[str, Any]) -> None:
    image = {"type": "image", "mimeType": "image/png", **fields}
    resource = {"type": "resource", "resource": {**image, "blob": image["data"], "data": None}}
    outcome = await called(Server({"content": [image, resource]}))
    assert (outcome.error, outcome.warnings) == (None, ())
    for number, file in enumerate(outcome.data["files"], 1):
        assert base64.b64decode(file.pop("content_base64")) == PICTURE
        assert file == {
            "filename": f"result-{number}.png", "content_type": "image/png", "size": len(PICTURE),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (None, "type 'None' is not known"),
        ("done", "type 'None' is not known"),
        ({"type": "hologram\n", "text": "x"}, r"type 'hologram\n' is not known"),
        ({"type": "text"}, "its text is missing"),
        ({"type": "text", "text": 5}, "its text is missing"),
        ({"type": "image", "data": None}, "its data is missing"),
        ({"type": "image", "data": "no base64!"}, "is not base64"),
        ({"type": "audio", "data": "a"}, "is not base64"),
        ({"type": "image", "text": "x"}, "its data is missing"),
        ({"type": "image", "data": "data:text/plain,x"}, "is not base64"),
        ({"type": "resource", "resource": None}, "its resource is missing"),
        ({"type": "resource", "resource": {"uri": "a:b", "blob": "?"}}, "is not base64"),
    ],
)
async def test_malformed_part_is_named_and_the_others_are_delivered(part: Any, why: str) -> None:
    outcome = await called(Server({"content": [TEXT, part, TEXT]}))
    assert (outcome.error, outcome.data) == (None, {"text": "done\ndone"})
    (warning,) = outcome.warnings
    assert warning.startswith("Part 2 of the MCP server's result was left out: ")
    assert why in warning
    assert "\n" not in warning
    structured = await called(Server({"content": [part], "structuredContent": {"a": 1}}))
    assert (structured.data, len(structured.warnings)) == ({"a": 1}, 1)
    alone = await called(Server({"content": [part]}))
    assert alone.error is not None
    assert alone.error.message.startswith("The tool has run, but its result is not understood.")


async def test_number_of_named_parts_is_bounded() -> None:
    outcome = await called(Server({"content": [TEXT, *[None] * 1_000]}))
    assert len(outcome.warnings) == MAX_UNREAD + 1
    assert outcome.warnings[-1] == "1000 parts were left out."


@pytest.mark.parametrize(
    "result",
    [
        {"content": None, "structuredContent": {"a": 1}, "isError": None, "resultType": None},
        {"content": {}, "structuredContent": {"a": 1}, "_meta": None},
        {"structuredContent": {"a": 1}},
    ],
)
async def test_result_without_parts_is_its_structured_content(result: Any) -> None:
    outcome = await called(Server(result))
    assert (outcome.error, outcome.data, outcome.warnings) == (None, {"a": 1}, ())


async def test_single_part_without_a_list_is_read() -> None:
    assert (await called(Server({"content": TEXT}))).data == {"text": "done"}


@pytest.mark.parametrize("result", [{"content": "no list"}, {"content": [None]}, {"content": 7}])
async def test_result_without_any_understood_part_is_an_error(result: Any) -> None:
    outcome = await called(Server(result))
    assert outcome.error is not None
    assert outcome.error.code == "EXECUTION_ERROR"

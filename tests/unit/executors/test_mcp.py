"""Calls of an MCP server's tools, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fumehood.core.call import TraceParent
from fumehood.executors.base import CallHandle
from fumehood.executors.mcp import call_tool
from fumehood.observe.tracing import context_of
from support.definitions import function_definition, registered

pytestmark = [pytest.mark.anyio, pytest.mark.row("D5")]


async def test_mcp_request_carries_the_trace_context_of_the_call() -> None:
    span = context_of("mine", "call_1", TraceParent("a" * 32, "b" * 16, "01"))
    asked: list[Any] = []

    class Server:
        async def call(self, name: str, arguments: Any, request: Any) -> Any:
            asked.append(request)
            return {"content": [{"type": "text", "text": "done"}]}

        def take_use(self) -> None:
            """It has no network."""

    run: Any = SimpleNamespace(
        tool=registered(function_definition()),
        arguments={},
        traceparent=str(span),
        handle=CallHandle(),
        limits=SimpleNamespace(wall_s=5, output_bytes=1000),
    )
    outcome = await call_tool(run, Server())  # type: ignore[arg-type]
    assert outcome.error is None
    assert asked[0].params == {"traceparent": f"00-{'a' * 32}-{span.span_id}-01"}

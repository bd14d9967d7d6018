"""The executor of MCP servers' tools: send one `tools/call` and read its result.

Host side; below it `mcp_servers`, which keeps the servers alive. Invariants: a call ends within its
time limit, and its server is then notified; everything in a result is untrusted and bounded, and
the engine never requests a URL from it.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import anyio

from fumehood.core.errors import (
    EndedBy,
    EngineError,
    ExecutionError,
    OutputLimitExceeded,
    SandboxUnavailable,
    UpstreamTimeout,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.returned_file import FILE_CONTENT
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.mcp_servers import McpServer
from fumehood.executors.mcp_wire import Request, RpcError
from fumehood.executors.outcome import Outcome
from fumehood.executors.rest import MAX_BODY_SHOWN, concluded
from fumehood.executors.upstreams import BodyTooLarge
from fumehood.registry.index import Source

FRAME_BYTES = 64 * 1024
"""Bytes reserved for the parts of a message around its result."""

_HOST = Placement(
    "host", "host", "the executor 'mcp' asks a server that runs on the host, as the operator's "
    "configuration says (mcp_servers, place)",
)  # fmt: skip
_HTTP = Placement(
    "host", "host", "the executor 'mcp' asks a server over HTTP from the engine's own process, at "
    "public addresses and at the hosts that rest.allowed_hosts names",
)  # fmt: skip
_CONTAINER = Placement(
    "container", "host", "the executor 'mcp' asks a server that runs in a container of its own, "
    "with no network but by the gateway, to the hosts of mcp_servers.NAME.network",
)  # fmt: skip


class McpExecutor(Executor):
    """Runs tools of MCP servers."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        if tool.endpoint is not None:
            return _HTTP
        return _CONTAINER if tool.sandboxed else _HOST

    def run(self, run: ToolRun) -> Coroutine[Any, Any, Outcome]:
        name = run.tool.definition.name
        servers = run.upstreams.mcp
        # Only tools that this engine registered for an MCP server: the definition of any other
        # tool could declare itself harmless.
        server = None
        if servers is not None and run.tool.source is Source.MCP:
            server = servers.of_tool(name)
        if server is None:
            raise SandboxUnavailable(
                f"No MCP server of the configuration (mcp_servers) has the tool {name}. Do not "
                "retry.",
                retryable=False,
            )
        return call_tool(run, server)


async def call_tool(run: ToolRun, server: McpServer) -> Outcome:
    """Send one call to its server and turn the result into an outcome."""
    tool, started = run.tool.definition, time.monotonic()
    meta: JsonObject = {"traceparent": run.traceparent}
    request = Request("tools/call", meta, run.handle.report)
    request.max_bytes = run.limits.output_bytes + FRAME_BYTES
    outcome = Outcome(EndedBy.OK, "none")
    try:
        result = await _ask(server, tool.name, run.arguments, request, run.limits)
        data = result_data(result, tool)
        # The message was already bounded. Here files count as base64, which is longer.
        most = 2 * run.limits.output_bytes if "files" in data else None
        outcome = replace(outcome, data=data, max_data_bytes=most)
    except EngineError as error:
        outcome = concluded(outcome, error, request.attempt, tool)
    if (use := server.take_use()) is not None:
        warnings = (*outcome.warnings, *use.warnings())
        outcome = replace(outcome, network=use.report(), warnings=warnings)
    return replace(outcome, network_ms=(time.monotonic() - started) * 1e3)


async def _ask(
    server: McpServer, name: str, arguments: JsonObject, request: Request, limits: Limits
) -> JsonObject:
    """Return the server's result. Raises EngineError if there is none."""
    try:
        with anyio.fail_after(limits.wall_s):
            return await server.call(name, arguments, request)
    except TimeoutError:
        raise UpstreamTimeout(
            f"The MCP server did not answer in {limits.wall_s:g} s.",
            details={"ended_by": "wall_time", "limit": {"timeout_seconds": limits.wall_s}},
        ) from None
    except BodyTooLarge:
        raise OutputLimitExceeded(
            f"The answer of the MCP server is over {limits.output_bytes} bytes. Ask for less.",
            details={"ended_by": "output", "limit": {"output_bytes": limits.output_bytes}},
        ) from None
    except RpcError as error:
        shown = error.message[:MAX_BODY_SHOWN]
        raise ExecutionError(f"The MCP server refused the call: {shown}") from None


def result_data(result: JsonObject, tool: ToolDefinition) -> JsonObject:
    """Return the tool's data: the structured content if there is one, otherwise the texts as
    `text`. Files and links are added as `files` and `links` unless those names are taken.

    Raises:
        ExecutionError: the tool failed or asks for input, or the result is invalid.
    """
    if result.get("resultType", "complete") != "complete":
        raise ExecutionError("The tool of the MCP server asks for more input. Do not retry.")
    content = result.get("content", [])
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ExecutionError("The MCP server's result is not understood. Do not retry.")
    texts = [
        b["text"] for b in content if b.get("type") == "text" and isinstance(b.get("text"), str)
    ]
    text = "\n".join(texts)
    if result.get("isError") is True:
        shown = text[:MAX_BODY_SHOWN] or "no reason given"
        raise ExecutionError(f"The tool failed: {shown}")
    structured = result.get("structuredContent")
    if tool.output_schema is not None and not isinstance(structured, dict):
        raise ExecutionError("The result lacks the structured content that the tool promises.")
    data: JsonObject = dict(structured) if isinstance(structured, dict) else {"text": text}
    if structured is not None and not isinstance(structured, dict):
        data["value"] = structured
    files = [file for n, block in enumerate(content, 1) if (file := _file(block, n)) is not None]
    links = [_link(block) for block in content if block.get("type") == "resource_link"]
    if files and "files" not in data:
        data["files"] = files
    if links and "links" not in data:
        data["links"] = links
    return data


def _file(block: JsonObject, number: int) -> JsonObject | None:
    """Return an image, audio or embedded resource as a file (mission E7), or None."""
    inner = block.get("resource") if block.get("type") == "resource" else block
    if block.get("type") not in ("image", "audio", "resource") or not isinstance(inner, dict):
        return None
    encoded = inner.get("data", inner.get("blob"))
    if encoded is None and block.get("type") == "resource" and isinstance(inner.get("text"), str):
        encoded = base64.b64encode(inner["text"].encode()).decode()
    if not isinstance(encoded, str):
        return None
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise ExecutionError("A file in the MCP server's result is not base64.") from None
    kind = inner.get("mimeType")
    kind = kind[:200] if isinstance(kind, str) and kind.isprintable() else None
    ending = (kind or "").rpartition("/")[2].partition(";")[0]
    suffix = ending if ending.isalnum() and len(ending) <= 8 else "bin"
    return {
        "filename": f"result-{number}.{suffix}",
        "content_type": kind or "application/octet-stream",
        "size": len(content),
        FILE_CONTENT: encoded,
    }


def _link(block: JsonObject) -> JsonObject:
    """Return a link with the server's own texts. The engine never follows it."""
    keys = ("uri", "name", "mimeType", "description")
    return {key: block[key] for key in keys if isinstance(block.get(key), str)}

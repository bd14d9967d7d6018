"""The executor of MCP tools: calls the MCP server that has the tool, and converts its result to an
outcome.

Host side, above `servers`. Invariants:

* The engine calls a tool only if a configured server has listed it.
* A call ends within its time limit. If the time limit ends the call, the server is notified.
* Everything in a result is treated as hostile and limited in size. The engine never fetches a URL
  from a result.
"""

from __future__ import annotations

import base64
import contextlib
import re
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
from fumehood.executors.outcome import Outcome
from fumehood.mcp.client.servers import McpServer
from fumehood.mcp.client.settings import SEPARATOR
from fumehood.mcp.client.wire import Request, RpcError
from fumehood.outgoing.upstreams import MAX_BODY_SHOWN, BodyTooLarge, concluded
from fumehood.protocol.cursors import Cursors
from fumehood.protocol.framing import whole_words
from fumehood.registry.index import RegisteredTool

FRAME_BYTES = 64 * 1024
"""Maximum number of bytes that a message has in addition to the result in it."""

MAX_UNREAD = 5
"""Maximum number of warnings about content blocks of one result that are not understood."""

_DATA_URL = re.compile(r"data:([^,;]*)[^,]*;base64,", re.IGNORECASE)
_ONE_BASE64 = str.maketrans("-_", "+/", " \t\r\n")

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
    """Calls tools of MCP servers."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        if tool.endpoint is not None:
            return _HTTP
        return _CONTAINER if tool.sandboxed else _HOST

    def upstream(self, tool: ToolDefinition) -> str | None:
        return f"mcp:{tool.name.partition(SEPARATOR)[0]}"

    def sends(
        self,
        tool: RegisteredTool,
        arguments: JsonObject,
        cursors: Cursors,
        principal_id: str,
    ) -> JsonObject | None:
        return server_of(tool).shown(tool.definition.name)

    def run(self, run: ToolRun) -> Coroutine[Any, Any, Outcome]:
        return call_tool(run, server_of(run.tool))


def server_of(tool: RegisteredTool) -> McpServer:
    """Return the MCP server that has listed the tool.

    Raises SandboxUnavailable if no configured server has listed it.
    """
    # Only a tool that this engine has registered for an MCP server has a service of this class. Any
    # other tool could call itself harmless in its definition.
    if not isinstance(tool.service, McpServer):
        raise SandboxUnavailable(
            "No MCP server of the configuration (mcp_servers) has the tool "
            f"{tool.definition.name}. Do not retry.",
            retryable=False,
        )
    return tool.service


async def call_tool(run: ToolRun, server: McpServer) -> Outcome:
    """Call a tool of an MCP server, and return the result as an outcome."""
    tool, started = run.tool.definition, time.monotonic()
    meta: JsonObject = {"traceparent": run.traceparent}
    request = Request("tools/call", meta, run.handle.report)
    request.max_bytes = run.limits.output_bytes + FRAME_BYTES
    outcome = Outcome(EndedBy.OK, "none")
    try:
        result = await _ask(server, tool.name, run.arguments, request, run.limits)
        data, unread = result_data(result, tool)
        # The size of the message was already limited. Files count as base64 here, which is longer.
        most = 2 * run.limits.output_bytes if "files" in data else None
        outcome = replace(outcome, data=data, max_data_bytes=most, warnings=unread)
    except EngineError as error:
        outcome = concluded(outcome, error, request.attempt, tool)
    for share in server.used():
        outcome = replace(
            outcome,
            sandbox={**share.sandbox, **outcome.sandbox},
            warnings=outcome.warnings + share.warnings,
        )
    return replace(outcome, network_ms=(time.monotonic() - started) * 1e3)


async def _ask(
    server: McpServer, name: str, arguments: JsonObject, request: Request, limits: Limits
) -> JsonObject:
    """Send the call of the tool `name` to the server, and return the call's result. Raises
    EngineError if there is no result.
    """
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
        shown = whole_words(str(error), MAX_BODY_SHOWN)
        raise ExecutionError(f"The MCP server refused the call: {shown}") from None


def result_data(result: JsonObject, tool: ToolDefinition) -> tuple[JsonObject, tuple[str, ...]]:
    """Return the data of the tool's result, and warnings about content blocks that are not
    understood.

    If the result has structured content that is an object, this object is the data. Otherwise, the
    data has the field `text` with the texts of the result. Structured content that is not an object
    is then added as the field `value`.

    Files and links are added in the fields `files` and `links`, unless the structured content has
    fields with these names.

    Raises:
        ExecutionError: the tool failed or asks for input, nothing in the result is understood, or
            the structured content that the tool promises is missing.
    """
    if (result.get("resultType") or "complete") != "complete":
        raise ExecutionError("The tool of the MCP server asks for more input. Do not retry.")
    content = result.get("content") or []
    found: dict[str, list[Any]] = {"text": [], "files": [], "links": []}
    unread: list[str] = []
    for number, block in enumerate(content if isinstance(content, list) else [content], 1):
        try:
            place, part = _part(block, number)
            found[place].append(part)
        except ValueError as why:
            # The other blocks are still used, because the tool has already run.
            unread.append(f"Part {number} of the MCP server's result was left out: {why}.")
    unread[MAX_UNREAD:] = [f"{len(unread)} parts were left out."] if unread[MAX_UNREAD:] else []
    text = "\n".join(found["text"])
    if result.get("isError") is True:
        shown = whole_words(text, MAX_BODY_SHOWN) or "no reason given"
        raise ExecutionError(f"The tool failed: {shown}")
    structured = result.get("structuredContent")
    if unread and structured is None and not any(found.values()):
        raise ExecutionError(
            f"The tool has run, but its result is not understood. {' '.join(unread)} Do not retry."
        )
    if tool.output_schema is not None and not isinstance(structured, dict):
        raise ExecutionError("The result lacks the structured content that the tool promises.")
    data: JsonObject = dict(structured) if isinstance(structured, dict) else {"text": text}
    if structured is not None and not isinstance(structured, dict):
        data["value"] = structured
    for name in ("files", "links"):
        if found[name]:
            data.setdefault(name, found[name])
    return data, tuple(unread)


def _part(block: Any, number: int) -> tuple[str, Any]:
    """Convert one content block of a result. Return its kind (`text`, `links` or `files`) and the
    converted block. `number` is the position of the block in the result.

    Raises:
        ValueError: the block is not understood. The message is a clause that says why.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return "text", block["text"]
    if kind == "resource_link":
        return "links", _link(block)
    inner = block.get("resource") if kind == "resource" else block
    if kind in ("image", "audio", "resource") and isinstance(inner, dict):
        return "files", _file(inner, number, may_be_text=kind == "resource")
    if kind in ("text", "resource"):
        raise ValueError(f"its {kind} is missing")
    raise ValueError(f"its type {str(kind)[:40]!a} is not known")


def _file(block: JsonObject, number: int, *, may_be_text: bool) -> JsonObject:
    """Convert an image, an audio clip or an embedded resource to a file. `number` is the position
    of the block in the result. If `may_be_text` is True, text is accepted in place of base64 data.

    Four variants of base64 data are also accepted: a `data:` URL, data with line breaks, data in
    the base64 alphabet for URLs, and data without padding.

    Raises:
        ValueError: the data is missing, or is not base64.
    """
    kind, content = block.get("mimeType"), None
    encoded = next((each for each in map(block.get, ("data", "blob")) if each is not None), None)
    if encoded is None and may_be_text and isinstance(block.get("text"), str):
        content = block["text"].encode("utf-8", "replace")
    elif isinstance(encoded, str):
        if (found := _DATA_URL.match(encoded)) is not None:
            kind, encoded = kind or found[1], encoded[found.end() :]
        plain = encoded.translate(_ONE_BASE64)
        with contextlib.suppress(ValueError):
            content = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    if content is None:
        raise ValueError("its data is missing, or is not base64")
    kind = kind[:200] if isinstance(kind, str) and kind.isprintable() else ""
    ending = kind.rpartition("/")[2].partition(";")[0]
    suffix = ending if ending.isalnum() and len(ending) <= 8 else "bin"
    return {
        "filename": f"result-{number}.{suffix}",
        "content_type": kind or "application/octet-stream",
        "size": len(content),
        FILE_CONTENT: base64.b64encode(content).decode(),
    }


def _link(block: JsonObject) -> JsonObject:
    """Convert a link to its fields `uri`, `name`, `mimeType` and `description`. Leave out the
    fields that the server has not sent as text. The engine never fetches the link.
    """
    keys = ("uri", "name", "mimeType", "description")
    return {key: block[key] for key in keys if isinstance(block.get(key), str)}

"""The MCP server's answers about itself, and its own two tools.

Used by `server.py`, and by `stdio.py` if no daemon answers. It needs only the standard library, so
that the bridge starts quickly.
"""

from __future__ import annotations

from functools import cache

from fumehood.core.json_types import JsonObject
from fumehood.mcp.messages import HANDSHAKES, MODERN, SERVER_KEY

INSTRUCTIONS = (
    "Tools that run in a sandbox. A call that needs approval is decided by a human elsewhere: tell "
    "the user its approval id, and do not look for a way around it."
)

LIST_TOOLS, RUN_TOOL = "list_tools", "run_tool"
OWN_TOOLS: list[JsonObject] = [
    {
        "name": LIST_TOOLS,
        "description": "List the tools that can be called now, with their parameters; for a "
        "client whose own list may be out of date.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Only tools with these words."}
            },
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True,
                        "openWorldHint": False},
    },
    {
        "name": RUN_TOOL,
        "description": "Call a tool by its name, as list_tools shows it.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "The tool's name."},
                "arguments": {"type": "object", "description": "The tool's arguments."},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": False, "destructiveHint": True, "idempotentHint": False,
                        "openWorldHint": True},
    },
]  # fmt: skip
"""The server's own tools. An engine's tool with the same name is hidden; `run_tool` can still run
it."""

UNCACHED: JsonObject = {"ttlMs": 0, "cacheScope": "private"}
"""Tells clients not to cache lists, which change at any time and differ between callers."""

_CAPABILITIES: JsonObject = {"tools": {"listChanged": True}, "resources": {}}


def handshake_version(wanted: object) -> str:
    """Return the protocol version for the answer to `initialize`.

    It is the requested one if it is supported, otherwise the newest one with a handshake.
    """
    return wanted if isinstance(wanted, str) and wanted in HANDSHAKES else HANDSHAKES[-1]


def initialized(version: str) -> JsonObject:
    """Return the result of `initialize`."""
    return {
        "protocolVersion": version,
        "capabilities": _CAPABILITIES,
        "serverInfo": server_info(),
        "instructions": INSTRUCTIONS,
    }


def discovered() -> JsonObject:
    """Return the result of `server/discover`."""
    return {
        "supportedVersions": [MODERN, *reversed(HANDSHAKES)],
        "capabilities": _CAPABILITIES,
        "instructions": INSTRUCTIONS,
        **UNCACHED,
    }


def failed(words: str) -> JsonObject:
    """Return the result of a `tools/call` that did not reach a tool. `words` is the error text."""
    return {"content": [{"type": "text", "text": words}], "isError": True}


def stamped(result: JsonObject) -> JsonObject:
    """Add the fields that version 2026-07-28 requires in each result."""
    meta = {**result.get("_meta", {}), SERVER_KEY: server_info()}
    return {"resultType": "complete", **result, "_meta": meta}


@cache
def server_info() -> JsonObject:
    """Return the server's name and version."""
    from importlib.metadata import version  # the bridge rarely needs it, and starts often

    return {"name": "fumehood", "version": version("fumehood")}

"""The JSON-RPC messages of the Model Context Protocol, and the server's answers about itself.

This module is used by `dispatch.py` in the daemon, and by `stdio.py` in the process that an MCP
client starts. That process must start quickly, so this module imports only the standard library and
strict JSON. Invariant: an invalid message is answered with an error, and no part of it reaches a
tool.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeGuard

from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

MODERN = "2026-07-28"
"""The protocol version without a handshake. In it, each request describes its client."""

HANDSHAKES = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""The protocol versions with a handshake, oldest first. In them, a client begins with
`initialize`.
"""

FIRST_WITH_OUTPUT = "2025-06-18"
"""The first protocol version with output schemas."""

VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
SUBSCRIPTION_KEY = "io.modelcontextprotocol/subscriptionId"
ENVELOPE_KEY = "fumehood/envelope"

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
UNSUPPORTED_VERSION = -32022

MAX_ID_CHARACTERS = 200
"""Maximum number of characters of a request id or a progress token."""

TOOLS_CHANGED = "notifications/tools/list_changed"
NAMED_BY = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
"""Method of a request → the parameter that the header `Mcp-Name` must repeat."""


class RpcError(Exception):
    """An error with which the server answers a request. `code` is the code in JSON-RPC, and `data`
    describes the error further.
    """

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data

    @property
    def http_status(self) -> int:
        """The HTTP status of a response with this error, from version 2026-07-28 on."""
        if self.code == INTERNAL_ERROR:
            return 200
        return 404 if self.code == METHOD_NOT_FOUND else 400

    def encode(self, request_id: str | int | None) -> bytes:
        """Return the encoded error response to the request with the id `request_id`. The id is None
        if it could not be read.
        """
        error = {"code": self.code, "message": str(self)}
        if self.data is not None:
            error["data"] = self.data
        return strict_json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error})


def read_message(raw: bytes) -> JsonObject:
    """Parse one message, and return it. It is one of these:

    * a request, which has `method` and `id`
    * a notification, which has no `id`
    * a response, which has no `method`

    Raises:
        RpcError: the bytes are not JSON, or the message is not valid in JSON-RPC 2.0.
    """
    try:
        message = strict_json.loads(raw)
    except strict_json.StrictJsonError as error:
        raise RpcError(PARSE_ERROR, f"The message cannot be read: {error}.") from None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, "Send one JSON-RPC 2.0 message, and no batch.")
    if "id" in message and not is_id(message["id"]):
        raise RpcError(INVALID_REQUEST, "An id is an integer or a short text.")
    has_method = isinstance(message.get("method"), str)
    has_outcome = ("result" in message) != ("error" in message)
    is_response = "method" not in message and "id" in message and has_outcome
    if not has_method and not is_response:
        raise RpcError(INVALID_REQUEST, "The message has neither a method nor an outcome.")
    if not isinstance(message.get("params", {}), dict):
        raise RpcError(INVALID_REQUEST, "The params must be an object.")
    return message


def encode_result(request_id: str | int, result: bytes) -> bytes:
    """Return the encoded response to the request with the id `request_id`. `result` is already
    JSON.
    """
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (strict_json.dumps(request_id), result)


def encode_call(method: str, params: JsonObject | None = None, *, id: str | None = None) -> bytes:  # noqa: A002
    """Return an encoded request with the id `id`. Without `id`, return an encoded notification."""
    message: JsonObject = {"jsonrpc": "2.0", "method": method}
    if id is not None:
        message["id"] = id
    return strict_json.dumps(message if params is None else {**message, "params": params})


def meta_of(message: JsonObject) -> JsonObject:
    """Return the field `_meta` of a message's parameters, or an empty object if it has none."""
    meta = message.get("params", {}).get("_meta")
    return meta if isinstance(meta, dict) else {}


def is_id(value: Any) -> TypeGuard[str | int]:
    """Return whether `value` is valid as a request id or as a progress token.

    The length is limited, because each progress notification repeats the token.
    """
    if isinstance(value, str):
        return len(value) <= MAX_ID_CHARACTERS
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


# -- answers about the server --------------------------------------------------------------


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
"""The tools that the MCP server itself provides. If a tool of the engine has one of these names,
the list does not contain it, but `run_tool` can run it.
"""

UNCACHED: JsonObject = {"ttlMs": 0, "cacheScope": "private"}
"""Fields that tell clients not to cache a list. A list can change at any time, and is different for
each caller.
"""

_CAPABILITIES: JsonObject = {"tools": {"listChanged": True}, "resources": {}}


def handshake_version(wanted: object) -> str:
    """Return the protocol version for the answer to `initialize`. `wanted` is the version that the
    client asks for.

    If it is not supported, return the newest version with a handshake.
    """
    return wanted if isinstance(wanted, str) and wanted in HANDSHAKES else HANDSHAKES[-1]


def initialized(version: str) -> JsonObject:
    """Return the result of the method `initialize`. `version` is the protocol version for the
    client.
    """
    return {
        "protocolVersion": version,
        "capabilities": _CAPABILITIES,
        "serverInfo": server_info(),
        "instructions": INSTRUCTIONS,
    }


def discovered() -> JsonObject:
    """Return the result of the method `server/discover`."""
    return {
        "supportedVersions": [MODERN, *reversed(HANDSHAKES)],
        "capabilities": _CAPABILITIES,
        "instructions": INSTRUCTIONS,
        **UNCACHED,
    }


def failed(words: str) -> JsonObject:
    """Return the result of a `tools/call` that has not reached a tool. `words` is the error
    message.
    """
    return {"content": [{"type": "text", "text": words}], "isError": True}


def stamped(result: JsonObject) -> JsonObject:
    """Return a result with the additional fields that version 2026-07-28 requires in every
    result.
    """
    meta = {**result.get("_meta", {}), SERVER_KEY: server_info()}
    return {"resultType": "complete", **result, "_meta": meta}


@cache
def server_info() -> JsonObject:
    """Return the name and the version of the server, as clients see them."""
    from importlib.metadata import version  # the bridge rarely needs it, and starts often

    return {"name": "fumehood", "version": version("fumehood")}

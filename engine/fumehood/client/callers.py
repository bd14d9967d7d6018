"""The requests of the callers' socket, each as a function that makes one."""

from __future__ import annotations

from typing import Any

from fumehood.client.ask import Ask, address, data_of, encode, object_of, plain
from fumehood.model.answers import ToolDetails, ToolList
from fumehood.model.envelope import Envelope
from fumehood.model.json_types import JsonObject
from fumehood.model.status import Health, Readiness
from fumehood.model.tool import ToolDefinition
from fumehood.wire.messages import decode_envelope

LONGEST_CALL_S = 600.0
"""How long a call may run that says no time of its own: the longest that a wall allows."""


def call(tool: str, arguments: JsonObject | None, options: JsonObject) -> Ask[Envelope]:
    """One call. Raises ValueError where it is not JSON, or the name can be none."""
    body = {"arguments": arguments if arguments is not None else {}, "options": options}
    path = address("tools", tool, "call")
    return Ask("POST", path, decode_envelope, encode(body), _work_s(options))


def tools() -> Ask[list[ToolDefinition]]:
    """The preferred version of every tool."""
    read = data_of(ToolList)
    return Ask("GET", address("tools"), lambda raw: list(read(raw).items))


def tool(reference: str) -> Ask[ToolDetails]:
    """One tool by `name` or `name@version`."""
    return Ask("GET", address("tools", reference), data_of(ToolDetails))


def health() -> Ask[Health]:
    """Whether the process answers."""
    return Ask("GET", address("health"), plain(Health))


def ready() -> Ask[Readiness]:
    """Whether calls are served."""
    return Ask("GET", address("ready"), plain(Readiness))


def openapi() -> Ask[JsonObject]:
    """The document of the socket that is asked."""
    return Ask("GET", address("openapi.json"), object_of)


def request(method: str, path: str, body: JsonObject | None = None) -> Ask[Envelope]:
    """Any address that answers with an envelope."""
    return Ask(method, path, decode_envelope, None if body is None else encode(body))


def _work_s(options: JsonObject) -> float:
    """How long the call may run. What is no time is the engine's to refuse, at once."""
    asked: Any = options.get("timeout_seconds")
    if isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0:
        return float(asked)
    return LONGEST_CALL_S

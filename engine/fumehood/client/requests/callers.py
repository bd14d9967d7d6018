"""The requests of the callers' socket, each as a function that makes one."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from decimal import Decimal
from typing import Any

from fumehood.answers import (
    AgentTools,
    CallAnswer,
    CallList,
    CancelledCall,
    ToolDetails,
    ToolList,
)
from fumehood.budgets.model import UsageTable
from fumehood.client.api_request import (
    ApiRequest,
    address,
    data_of,
    encode,
    listed,
    object_of,
    plain,
    query_text,
)
from fumehood.client.errors import DaemonUnavailable, Refused
from fumehood.client.requests.call import call_read_by
from fumehood.core.call_log import CallPage, CallRecord
from fumehood.core.envelope import Envelope
from fumehood.core.events import Event, last_event
from fumehood.core.json_types import JsonObject
from fumehood.core.keywords import (
    AllUsageKeywords,
    CallKeywords,
    CallQueryKeywords,
    ToolPageKeywords,
    checked,
)
from fumehood.core.status import Health, Readiness
from fumehood.core.tool import ToolDefinition
from fumehood.protocol.blob_urls import parse_blob_url
from fumehood.protocol.messages import decode_envelope

PAGE = 100
"""Tools of one request while all of them are read: the most that the engine gives."""


def call(
    tool: str, arguments: JsonObject | None, options: Mapping[str, object]
) -> ApiRequest[Envelope]:
    """One call. Raises ValueError where it is not JSON, or the name can be none."""
    chosen = checked(CallKeywords, "call", options)
    return call_read_by(decode_envelope, tool, arguments, chosen)


def stream(
    tool: str, arguments: JsonObject | None, options: Mapping[str, object]
) -> ApiRequest[Event]:
    """One call that is followed; `read` is for the answer that comes without events."""
    chosen = checked(CallKeywords, "stream", options)
    body = {"arguments": arguments if arguments is not None else {}, "options": chosen}
    path = address("tools", tool, "sse")
    # Comments keep the connection alive, however long the call takes.
    return ApiRequest("POST", path, lambda raw: last_event(decode_envelope(raw)), encode(body))


def cancel(call_id: str) -> ApiRequest[None]:
    """The end of a running call."""
    read = data_of(CancelledCall)

    def nothing(raw: bytes) -> None:
        read(raw)

    return ApiRequest("POST", address("calls", call_id, "cancel"), nothing)


def tools_page(**query: Any) -> ApiRequest[ToolList]:
    """One page of the tools."""
    asked = checked(ToolPageKeywords, "tools", query)
    return ApiRequest("GET", address("tools") + query_text(asked), data_of(ToolList))


def all_tools(
    **filters: Any,
) -> Generator[ApiRequest[ToolList], ToolList, list[tuple[ToolDefinition, str]]]:
    """Every page after the other: yields requests, is sent their answers, returns the tools.

    Raises:
        DaemonUnavailable: a list that never ends, which is none of an engine's.
    """
    found: list[tuple[ToolDefinition, str]] = []
    cursors: set[str] = set()
    cursor = None
    while True:
        page = yield tools_page(**filters, limit=PAGE, cursor=cursor)
        found += [(tool, page.sources.get(tool.name, "")) for tool in page.items]
        cursor = page.pagination.next_cursor
        if cursor is None:
            return found
        if cursor in cursors:
            raise DaemonUnavailable("The list of tools never ends: that is no fumehood engine.")
        cursors.add(cursor)


def agent_tools(
    agent_id: str,
    *,
    categories: Iterable[str] | None = None,
    exclude_dangerous: bool = True,
    max_cost: Decimal | None = None,
    at_most: int | None = None,
) -> ApiRequest[AgentTools]:
    """An agent's tools as it sees them. Raises ValueError where a category holds a comma."""
    chosen = None if categories is None else listed(categories)
    if chosen is not None and any("," in category for category in chosen):
        raise ValueError("A category with a comma cannot be asked for.")
    query = {
        "agent_id": agent_id,
        "categories": None if chosen is None else ",".join(chosen),
        "exclude_dangerous": exclude_dangerous,
        "max_cost": None if max_cost is None else f"{max_cost:f}",
        "at_most": at_most,
    }
    return ApiRequest("GET", address("tools") + query_text(query), data_of(AgentTools))


def calls(**query: Any) -> ApiRequest[CallPage]:
    """A page of the caller's own calls."""
    read = data_of(CallList)
    asked = query_text(checked(CallQueryKeywords, "calls", query))
    return ApiRequest("GET", address("calls") + asked, lambda raw: read(raw).page)


def usage(by: str | Iterable[str] | None, query: Mapping[str, object]) -> ApiRequest[UsageTable]:
    """What calls took together; `by` is one name or several."""
    names = by if by is None or isinstance(by, str) else ",".join(by)
    asked = {"by": names, **checked(AllUsageKeywords, "usage", query)}
    return ApiRequest("GET", address("usage") + query_text(asked), data_of(UsageTable))


def call_record(call_id: str) -> ApiRequest[CallRecord]:
    """One call of the caller's own."""
    read = data_of(CallAnswer)
    return ApiRequest("GET", address("calls", call_id), lambda raw: read(raw).call)


def tool(reference: str) -> ApiRequest[ToolDetails]:
    """One tool by `name` or `name@version`."""
    return ApiRequest("GET", address("tools", reference), data_of(ToolDetails))


def blob(url: str) -> ApiRequest[None]:
    """The bytes behind an address of an answer's; `read` is for a refusal in their place.

    Raises:
        ValueError: it is no address of a blob, so nothing would be asked of anybody.
    """
    parse_blob_url(url)

    def refused(raw: bytes) -> None:
        raise Refused(decode_envelope(raw))

    return ApiRequest("GET", url, refused)


def health() -> ApiRequest[Health]:
    """Whether the process answers."""
    return ApiRequest("GET", address("health"), plain(Health))


def ready() -> ApiRequest[Readiness]:
    """Whether calls are served."""
    return ApiRequest("GET", address("ready"), plain(Readiness))


def openapi() -> ApiRequest[JsonObject]:
    """The document of the socket that is asked."""
    return ApiRequest("GET", address("openapi.json"), object_of)


def request(method: str, path: str, body: JsonObject | None = None) -> ApiRequest[Envelope]:
    """Any address that answers with an envelope."""
    return ApiRequest(method, path, decode_envelope, None if body is None else encode(body))

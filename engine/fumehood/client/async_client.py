"""`AsyncClient`: the methods of the callers' socket that do more than send one request.

All other methods are generated, in `async_operations.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any, Self, Unpack

from fumehood.answers import (
    AgentTools,
    ToolList,
)
from fumehood.client.api_request import (
    ANSWER_GRACE_S,
    CONNECT_TIMEOUT_S,
    ApiRequest,
    address,
    ask,
    ask_for_bytes,
    call_read_by,
    data_of,
    decision_read_by,
    encode,
    listed,
    object_of,
)
from fumehood.client.async_operations import AsyncCallerOperations, AsyncCommonOperations
from fumehood.client.async_transport import AsyncTransport
from fumehood.client.exchange import Endpoint, Write, place_of
from fumehood.client.files import new_file
from fumehood.core.call_log import CallRecord
from fumehood.core.decision import Decision
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import CallKeywords, DecisionKeywords
from fumehood.core.names import checked_keywords
from fumehood.core.pages import MAX_ITEMS, Pages
from fumehood.core.returned_file import parse_blob_url
from fumehood.core.tool import ToolDefinition
from fumehood.protocol.messages import decode_envelope

PAGE = 100
"""Number of tools to request per page. The engine allows no larger number."""


class AsyncBaseClient(AsyncCommonOperations):
    """Base class of the two clients, for the callers' socket and the control socket. It contains
    the methods that both clients have.
    """

    _is_control = False

    def __init__(
        self,
        socket_path: Path | str | None = None,
        *,
        credential: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        grace_s: float = ANSWER_GRACE_S,
    ) -> None:
        """Create a client, without connecting to the engine.

        The default `socket_path` is the socket that the command line uses. `socket_path` can also
        be the address of an engine on another machine, `https://HOST:PORT`. The engine's
        certificate is then checked against the system's certificate authorities or those in
        `SSL_CERT_FILE`. `credential` is a token or, on the control socket, an approver's
        credential. The client waits for an answer `grace_s` seconds longer than the engine may work
        on the request.

        Raises:
            ValueError: the address, the credential or a time is invalid.
            ConfigError: no path is given, and the configuration is invalid.
        """
        path = place_of(socket_path, control=self._is_control)
        endpoint = Endpoint(path, credential, connect_timeout_s, grace_s)
        self._transport = AsyncTransport(endpoint)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; the client cannot be used again."""
        await self._transport.close()

    async def openapi(self) -> JsonObject:
        """Fetch the OpenAPI document of this socket."""
        return await self._transport.send(ApiRequest("GET", address("openapi.json"), object_of))

    async def request(self, method: str, path: str, body: JsonObject | None = None) -> Envelope:
        """Send a request to the engine's address `path`, and return the envelope. `method` is the
        HTTP method. Only addresses that answer with an envelope can be used.

        Raises:
            ValueError: the body is not JSON, so nothing was sent.
        """
        content = None if body is None else encode(body)
        return await self._transport.send(ApiRequest(method, path, decode_envelope, content))


class AsyncClient(AsyncBaseClient, AsyncCallerOperations):
    """A client for the callers' socket, with the core methods only.

    Programs use `fumehood.AsyncClient`, which adds the methods of parts.
    """

    async def call(
        self, tool: str, arguments: JsonObject | None = None, **options: Unpack[CallKeywords]
    ) -> Envelope:
        """Call a tool (`name` or `name@version`). The answer is always an envelope.

        `options` are the fields of `CallOptions`. Once the bytes of a call have been sent, the call
        is never repeated automatically. If the connection then breaks, the call may have run, and
        `DaemonUnavailable.may_have_acted` is True.
        Cancelling the waiting task does not stop the call, which continues within its own limits.

        Raises:
            TypeError: an option is unknown.
            ValueError: the arguments or options are not JSON, or the name is invalid; nothing was
                sent.
        """
        chosen = checked_keywords(CallKeywords, "call", options)
        return await self._transport.send(call_read_by(decode_envelope, tool, arguments, chosen))

    async def decide(
        self,
        tool: str,
        arguments: JsonObject | None = None,
        *,
        context: JsonObject | None = None,
        **options: Unpack[DecisionKeywords],
    ) -> Decision:
        """Request a decision on a tool call that the caller makes itself. The engine does not run
        the tool.

        The caller may run the tool only if the decision is `allow`, and then only once. If the call
        waits for approval, the decision is `pending`. Repeat the same request to get the final
        decision. `context` is everything besides the arguments that determines the effect of the
        tool. `options` are the fields of `DecisionOptions`.

        Raises:
            TypeError: an option is unknown.
            ValueError: arguments, context or options are not JSON, so nothing was sent.
            Refused: the engine made no decision, so the tool must not run.
        """
        chosen = checked_keywords(DecisionKeywords, "decide", options)
        request = decision_read_by(data_of(Decision), tool, arguments, context, chosen)
        return await self._transport.send(request)

    async def fetch_all(
        self,
        tool: str,
        arguments: JsonObject | None = None,
        *,
        max_items: int = MAX_ITEMS,
        **options: Unpack[CallKeywords],
    ) -> list[Any]:
        """Fetch the items of all pages of a paginated tool, up to `max_items`.

        Each page is a separate call, with the previous page's `next_cursor` as `cursor`.

        Raises:
            CallFailed: the call for a page did not succeed; the exception contains that page's
                envelope.
            ValueError: the tool is not paginated, or `call` raises ValueError.
        """
        pages = Pages(arguments, max_items)
        while not pages.is_over:
            answer = await self.call(tool, pages.arguments, **options)
            pages.add(answer.raise_for_error().data)
        return pages.items

    async def tools(
        self,
        *,
        category: str | None = None,
        tag: str | None = None,
        type: str | None = None,  # noqa: A002 - the name that HTTP has
    ) -> list[ToolDefinition]:
        """Fetch the preferred version of every tool with this `category`, `tag` and `type`.

        A filter that is None matches every tool.

        Raises:
            Refused: the caller or a filter is unknown.
        """
        found = await self.tools_and_sources(category=category, tag=tag, type=type)
        return [tool for tool, _ in found]

    async def tools_and_sources(
        self,
        *,
        category: str | None = None,
        tag: str | None = None,
        type: str | None = None,  # noqa: A002 - as in `tools`
    ) -> list[tuple[ToolDefinition, str]]:
        """Fetch the same tools as `tools`, each with the name of the source that defines the tool.

        Raises:
            Refused: for the same reasons as in `tools`.
        """
        found: list[tuple[ToolDefinition, str]] = []
        cursor = None
        while True:
            page = await self.tools_page(
                category=category, tag=tag, type=type, limit=PAGE, cursor=cursor
            )
            found += [(tool, page.sources.get(tool.name, "")) for tool in page.items]
            cursor = page.pagination.next_cursor
            if cursor is None:
                return found

    async def tools_page(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        category: str | None = None,
        tag: str | None = None,
        type: str | None = None,  # noqa: A002 - as in `tools`
    ) -> ToolList:
        """Fetch one page of the tools. The HTTP reference describes the parameters.

        Raises:
            Refused: the query is invalid, or its cursor belongs to another list.
        """
        query = {"limit": limit, "cursor": cursor, "category": category, "tag": tag, "type": type}
        return await self._transport.send(ask("GET", data_of(ToolList), "tools", query=query))

    async def agent_tools(
        self,
        agent_id: str,
        *,
        categories: Iterable[str] | None = None,
        exclude_dangerous: bool = True,
        max_cost: Decimal | None = None,
        at_most: int | None = None,
    ) -> AgentTools:
        """Fetch an agent's tools, in the agent's order and with the schemas that the agent sees.

        The answer has at most `at_most` tools of the given `categories`, with a `cost_per_use` of
        at most `max_cost`. A filter that is None excludes no tool. The answer also names the tools
        that are left out, with the reasons.

        Raises:
            Refused: the agent is unknown, or this caller may not act for it.
        """
        query = {
            "agent_id": agent_id,
            "categories": listed(categories),
            "exclude_dangerous": exclude_dangerous,
            "max_cost": None if max_cost is None else f"{max_cost:f}",
            "at_most": at_most,
        }
        return await self._transport.send(ask("GET", data_of(AgentTools), "tools", query=query))

    async def call_record(self, call_id: str) -> CallRecord:
        """Fetch the record of one of this caller's calls.

        Raises:
            Refused: the call is unknown, belongs to another caller, or is no longer kept.
        """
        found = await self.call_state(call_id)
        return found.call

    async def blob(self, url: str) -> bytes:
        """Fetch a whole blob. `url` is the `url` or the `resource_url` in an answer.

        Raises:
            ValueError: `url` is not the address of a blob; nothing was sent.
            Refused: the blob is unknown, belongs to another caller, or has expired.
        """
        return await self._transport.fetch(_blob(url))

    async def whole(self, envelope: Envelope, field: str) -> Any:
        """Return the whole text of an answer's field, such as `stdout`.

        If the answer contains only the beginning and end of the text, fetch the whole text from the
        engine. `field` is a dotted path in `data` or in `error.details`.

        Raises:
            ValueError: the field is missing, or the engine did not keep the whole text.
            Refused: the whole text has expired.
        """
        url = envelope.shortened(field)
        if url is None:
            return envelope.at(field)
        return envelope.read_whole(field, await self.blob(url))

    async def save_blob(self, url: str, path: Path | str) -> None:
        """Save a blob as a new file, piece by piece. If the download fails, no file is left.

        Raises:
            FileExistsError: the file exists.
            ValueError, Refused: for the same reasons as in `blob`.
        """
        request = _blob(url)
        with new_file(Path(path)) as file:
            await self._transport.download(request, file.write)

    async def download_blob(self, url: str, write: Write) -> None:
        """Pass a blob to `write`, piece by piece, in order.

        Raises:
            ValueError, Refused: for the same reasons as in `blob`. Exceptions that `write` raises
                are passed on.
        """
        await self._transport.download(_blob(url), write)


def _blob(url: str) -> ApiRequest[None]:
    """Create the request for a blob, without sending it. Raises ValueError if `url` is not a blob's
    address.
    """
    parse_blob_url(url)
    return ask_for_bytes(url)

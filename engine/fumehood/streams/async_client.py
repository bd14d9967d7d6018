"""The methods of `AsyncClient` that follow the events of calls.

Client side: this module uses the protocol and values, but not the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Unpack

import anyio
import httpx2

from fumehood.client.api_request import ApiRequest, address, call_body, encode
from fumehood.client.async_client import AsyncClient
from fumehood.client.async_transport import AsyncTransport
from fumehood.client.exchange import Progress, unavailable
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import CallKeywords
from fumehood.core.names import checked_keywords
from fumehood.streams.events import Event
from fumehood.streams.resuming import (
    Following,
    answer_without_events,
    follow_request,
    is_followed,
)


class AsyncClientWithStreams(AsyncClient):
    """A client that can also follow the events of calls."""

    def stream(
        self, tool: str, arguments: JsonObject | None = None, **options: Unpack[CallKeywords]
    ) -> AsyncGenerator[Event, None]:
        """Call a tool and return its events as they happen. The last event contains the answer.
        `options` are the call's options, as in `call`.

        If the call is refused, the only event is an `ErrorEvent`. Closing the iterator closes the
        connection; the call continues, unless `cancel_on_disconnect` is set. If the connection
        breaks, the stream is resumed, and no event is lost or repeated.

        Raises:
            TypeError, ValueError: for the same reasons as in `call`.
            DaemonUnavailable: no server answers, or the stream breaks off and cannot be resumed.
        """
        chosen = checked_keywords(CallKeywords, "stream", options)
        # Comments keep the connection alive, however long the call takes.
        request = ApiRequest(
            "POST", address("tools", tool, "sse"), answer_without_events,
            encode(call_body(arguments, chosen)),
        )  # fmt: skip
        return _events(self._transport, request)

    def follow(self, call_id: str, after: str | None = None) -> AsyncGenerator[Event, None]:
        """Return the events of a call that `stream` started, even if the call has ended.

        `after` is the id of an event: only later events are returned. If `after` is None, all
        events are returned. If the events are not available, a single `ErrorEvent` is returned.

        Raises:
            DaemonUnavailable: no server answers, or the stream breaks off and cannot be resumed.
        """
        return _events(self._transport, follow_request(call_id, after))


async def _events(
    transport: AsyncTransport, request: ApiRequest[Event]
) -> AsyncGenerator[Event, None]:
    """Yield the events of a call as they arrive. Closing the iterator closes the connection.

    A stream that breaks off is resumed after its last event.

    Raises:
        DaemonUnavailable: no server answers, or the events cannot be resumed.
        ValueError: the request's address is too long.
    """
    following = Following(request, transport.endpoint)
    while not following.is_over:
        request, failed = following.request, None
        progress, has_begun = Progress(), False
        try:
            async with transport.begun(request, progress) as answer:
                has_begun = True
                if is_followed(answer.headers):
                    async for chunk in answer.aiter_raw():
                        for event in following.feed(chunk):
                            yield event
                elif (only := following.read_answer(await answer.aread())) is not None:
                    yield only
        except httpx2.InvalidURL as error:
            raise ValueError(f"The request cannot be sent: {error}.") from None
        except httpx2.HTTPError as error:
            failed = unavailable(request, transport.endpoint, error, progress)
            if not has_begun and following.may_send_again(error, progress):
                continue
        # Outside the handler, so that the library's error and its references are freed.
        if not following.is_over:
            await anyio.sleep(following.pause_s(failed))

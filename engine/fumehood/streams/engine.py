"""The methods of `fumehood.Engine` that stream a call's events.

Host side, above the engine of `engine.py`, of which only public members are used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Unpack

from fumehood.core.call import CallBody
from fumehood.core.errors import EngineError
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import CallKeywords
from fumehood.core.names import checked_keywords
from fumehood.engine import Engine
from fumehood.pipeline.incoming import parse_own_call
from fumehood.streams.call import StreamedCall, events_of
from fumehood.streams.events import ErrorEvent, Event, ResultEvent, last_event
from fumehood.streams.in_engine import Streams


class EngineWithStreams(Engine):
    """An engine that can also stream the events of a call."""

    def open_stream(self, tool: str, body: CallBody, principal: Principal | None) -> StreamedCall:
        """Start a call of `tool` that continues even if its caller goes away. `body` contains the
        arguments and the options.

        Return an object from which the caller can read the call's events.
        """
        return self.part(Streams).open(tool, body, principal)

    async def stream(
        self, tool: str, arguments: JsonObject | None = None, **options: Unpack[CallKeywords]
    ) -> AsyncIterator[Event]:
        """Call a tool and yield its events as they happen; the last event is the answer.

        If the iterator is closed, the call continues unless `cancel_on_disconnect` is set.

        Raises:
            TypeError, EngineNotRunning: for the same reasons as in `call`.
        """
        chosen = checked_keywords(CallKeywords, "stream", options)
        self.require_begun()
        try:
            name, body = parse_own_call(tool, arguments, chosen)
        except EngineError as error:
            yield last_event(self.refusal(error, tool=str(tool)))
            return
        call = self.open_stream(name, body, self.owner)
        refusal = await call.begun()
        if refusal is not None:
            self.delivered(call.live)
            yield last_event(refusal)
            return
        try:
            async for event in events_of(call):
                if isinstance(event, ResultEvent | ErrorEvent):
                    self.delivered(call.live)
                yield event
        finally:
            if body.options.cancel_on_disconnect:
                call.live.cancel()

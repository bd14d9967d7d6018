"""The methods of `AsyncClient` for batches.

Client side: this module uses the protocol and values, but not the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from fumehood.batches.model import BatchAnswer
from fumehood.client.api_request import ApiRequest, ask, batch_work_s, data_of
from fumehood.client.async_client import AsyncClient
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import BatchKeywords
from fumehood.core.names import checked_keywords


class AsyncClientWithBatches(AsyncClient):
    """A client that can also make several calls at once."""

    async def batch(
        self, calls: Iterable[JsonObject], **options: Unpack[BatchKeywords]
    ) -> list[Envelope]:
        """Make 1 to 1000 calls at once, and return their answers in the same order.

        Each call is `{"tool": …, "arguments": {…}, "options": {…}}`. `options` are the fields of
        `BatchOptions`. Each call has its own answer, even if the call is malformed, is refused or
        fails. If the connection closes, the engine cancels the running calls and starts no further
        calls.

        Raises:
            TypeError: an option is unknown.
            ValueError: the calls or options are not JSON, so nothing was sent.
            Refused: the number of calls or an option of the batch is invalid.
        """
        chosen = checked_keywords(BatchKeywords, "batch", options)
        found = await self._transport.send(batch_request(calls, chosen))
        return list(found.results)


def batch_request(calls: Iterable[JsonObject], options: JsonObject) -> ApiRequest[BatchAnswer]:
    """Return the request that makes these calls. `options` are the fields of `BatchOptions`."""
    body: JsonObject = {"calls": list(calls), "options": options}
    work_s = batch_work_s(body["calls"], options)
    return ask("POST", data_of(BatchAnswer), "calls", body=body, work_s=work_s)

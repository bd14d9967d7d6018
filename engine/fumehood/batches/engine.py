"""The methods of `fumehood.Engine` for batches.

Host side, above the kernel's engine, of which only public members are used. Every call of a batch
goes through `Engine.run`, so that no call skips a gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from fumehood.batches.batch import (
    Batch,
    Parse,
    parse_batch,
    parse_batch_call,
    parse_own_batch_call,
)
from fumehood.batches.model import BatchOptions, RawBatch
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import BatchKeywords
from fumehood.core.names import checked_keywords
from fumehood.engine import Engine


class EngineWithBatches(Engine):
    """An engine that can also make several calls at once."""

    async def batch(
        self, calls: Iterable[JsonObject], **options: Unpack[BatchKeywords]
    ) -> list[Envelope]:
        """Make many calls concurrently as the owner of this process, and return their answers in
        order.

        Each of the 1 to 1000 calls is `{"tool": …, "arguments": {…}, "options": {…}}`. `options`
        are the fields of `BatchOptions`. Each call has its own answer, even if the call is
        malformed or fails.

        Raises:
            InvalidParams: the number of calls or an option of the batch is wrong.
            TypeError: an option is unknown.
            EngineNotRunning: the engine was not entered, or has been left.
        """
        chosen = checked_keywords(BatchKeywords, "batch", options)
        self.require_begun()
        body = parse_batch({"calls": list(calls), "options": chosen})
        return await self.open_batch(body, self.owner, parse=parse_own_batch_call).run()

    def open_batch(
        self, body: RawBatch, principal: Principal, parse: Parse = parse_batch_call
    ) -> Batch:
        """Prepare a batch of calls of one principal, without running it. `parse` parses each call
        of the batch. When the batch runs, each call goes through `run`.
        """
        return batch_of(self, body.calls, body.options, principal, parse)


def batch_of(
    engine: Engine,
    members: Sequence[Any],
    options: BatchOptions,
    principal: Principal,
    parse: Parse,
) -> Batch:
    """Prepare a batch of calls of one principal, without running it.

    `parse` parses each member of `members`. When the batch runs, each call goes through
    `Engine.run`.
    """
    return Batch(
        members,
        options,
        parse=parse,
        run=lambda tool, call, live: engine.run(tool, call, principal, live),
        refuse=engine.refusal,
        delivered=engine.delivered,
        log=engine.log,
    )

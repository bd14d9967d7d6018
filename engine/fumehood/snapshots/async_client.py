"""The method of `AsyncClient` that calls a tool in several forks of a session.

Client side: this module uses the protocol and values, but not the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Unpack

from fumehood.batches.async_client import batch_request
from fumehood.client.async_client import AsyncClient
from fumehood.core.envelope import Envelope
from fumehood.core.errors import FumehoodError
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import CallKeywords
from fumehood.core.names import checked_keywords
from fumehood.snapshots.model import MAX_FORKS, ForkedCalls


class AsyncClientWithForks(AsyncClient):
    """A client that can also make calls in forks of a session."""

    async def map_forks(
        self,
        session: str,
        tool: str,
        inputs: Sequence[JsonObject],
        *,
        snapshot_id: str | None = None,
        best: Callable[[Envelope], Any] | None = None,
        **options: Unpack[CallKeywords],
    ) -> ForkedCalls:
        """Call a tool concurrently with each of `inputs`, each in its own fork of the session
        `session`.

        The session must have a disk. The forks begin with the session's current files. If
        `snapshot_id` is given, they begin with the files of the snapshot with this id or name.

        If `best` is given, it computes a value from each successful answer. The fork whose answer
        has the highest value is kept. All other forks are ended, together with their calls that
        wait for approval. If `best` is None, all forks are ended.

        `options` are the options of each call, as in `call`. Return the answers in the order of
        `inputs`, and the kept fork.

        Raises:
            TypeError: an option is unknown, or is `session_id`.
            ValueError: there are no inputs or too many, or they are not JSON.
            Refused: the session cannot be forked.

        Exceptions that `best` raises are passed on.
        """
        if not 0 < len(inputs) <= MAX_FORKS:
            raise ValueError(f"map_forks needs from 1 to {MAX_FORKS} inputs.")
        chosen = checked_keywords(CallKeywords, "map_forks", options)
        if "session_id" in chosen:
            raise TypeError("map_forks sets the option session_id to the forks of `session`.")
        forks = await self.fork_session(session, snapshot_id, count=len(inputs))
        kept = None
        try:
            calls = (
                {"tool": tool, "arguments": arguments, "options": {**chosen, "session_id": fork.id}}
                for fork, arguments in zip(forks, inputs, strict=True)
            )
            answers = (await self._transport.send(batch_request(calls, {}))).results
            good = [number for number, answer in enumerate(answers) if answer.error is None]
            if best is not None and good:
                kept = max(good, key=lambda number: best(answers[number]))
        finally:
            for number, fork in enumerate(forks):
                if number != kept:
                    with suppress(FumehoodError):  # the answers matter more
                        await self.end_session(fork.id)
        winner = None if kept is None else await self.session(forks[kept].id)
        return ForkedCalls(answers, kept, winner)

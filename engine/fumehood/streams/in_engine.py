"""The part object of one engine for streams.

If the engine ends before a followed call has ended, the call's last event is an error. If the
engine stops normally, it records this event itself. After a crash, the next engine records this
event.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from fumehood.core.call import CallBody
from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.limits import MB
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.clock import timestamp
from fumehood.observe.log import log_fault
from fumehood.storage.errors import StoreError
from fumehood.storage.retention import retention
from fumehood.streams.call import StreamedCall, last_record
from fumehood.streams.lost import answer_of_lost
from fumehood.streams.recordings import RecordedCall, RecordingReader, RecordingStore

if TYPE_CHECKING:
    from fumehood.compose import Composition


class Streams(EnginePart):
    """The part that starts calls whose events callers can read, and keeps the recordings of these
    events.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        most_mb = kernel.config.of("streams_mb", int)
        kept_minutes = kernel.config.of("streams_kept_minutes", float)
        assert most_mb is not None
        assert kept_minutes is not None
        self._log = kernel.log
        self._kept_s = kept_minutes * 60
        self.recordings = RecordingStore(
            kernel.files.directory,
            max_bytes=most_mb * MB,
            kept_s=self._kept_s,
            now=kernel.clock.now,
            remote=kernel.files.remote,
        )
        self._made: Composition
        self._opening: asyncio.Task[None]

    def open(self, tool: str, body: CallBody, principal: Principal | None) -> StreamedCall:
        """Start a call of `tool` that continues even if its caller goes away. `body` contains the
        arguments and the options.

        Return an object from which the caller can read the call's events. The caller must already
        have authenticated the principal.
        """
        made, now = self._made, self.kernel.clock.now
        request = made.calls.request(tool, body, principal)
        call = StreamedCall(
            request,
            self.recordings,
            timestamp=lambda: timestamp(now()),
            redact=made.services.redactor.line,
        )
        made.calls.start(request, call.live, call.end)
        return call

    async def follow(
        self, call_id: str, principal: Principal, after: str | None
    ) -> RecordingReader:
        """Return a reader of a recorded call's events. If `after` is given, the reader begins with
        the event that follows the event with the id `after`.

        Raises:
            ResourceNotFound: the principal has no such call, or its events are not kept.
            FilesAway: the events are in the remote place, which cannot be used now.
        """
        await self.recordings.fetch(call_id, principal.id)
        reader = self.recordings.find(call_id, principal.id, after)
        if reader is None:
            raise ResourceNotFound(
                "The events of no such call of yours are kept. Look the call up by its call id "
                "instead."
            )
        return reader

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Keep this part running during the block: open the recordings in the background, and
        delete expired recordings regularly. `made` contains the objects of the engine.
        """
        self._made = made
        self._opening = asyncio.create_task(self._open())
        on_fault = partial(log_fault, self._log, "state.retention_failed")
        try:
            async with retention(
                self._prune, self.kernel.clock.now, on_fault, kept_s=self._kept_s or math.inf
            ):
                yield
        finally:
            self._opening.cancel()
            with suppress(asyncio.CancelledError):
                await self._opening
            await self.recordings.room.aclose()

    async def recovered(self) -> None:
        """Record a last event for each call that was running when the previous engine ended.

        If this fails, the failure is only logged.
        """
        await self._opening
        try:
            lost = await self.recordings.end_lost(self._last_event)
        except Exception as fault:
            log_fault(self._log, "streams.not_ended", fault)
            return
        if lost:
            self._log.warning("streams.outcomes_unknown", calls=lost)

    async def _open(self) -> None:
        """Open the recordings. If this fails, the engine still starts."""
        try:
            await self.recordings.open()
        except StoreError as fault:
            self._log.error("streams.unavailable", reason=str(fault))

    async def _prune(self, now: datetime) -> int:
        await asyncio.shield(self._opening)
        return await self.recordings.prune(now)

    async def _last_event(self, call: RecordedCall) -> tuple[str, bytes]:
        answer = await answer_of_lost(
            call.call_id, call.principal_id, call.tool, call.trace_id, self._made.services
        )
        return last_record(answer)

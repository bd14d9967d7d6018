"""Retention: old rows of the call log go in the background, in small transactions.

Host side, started by the engine. At the start, each hour, and whenever so many calls were
recorded that the log has grown by a tenth. What fails is tried again the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime

from fumehood.store.calls import CallLog
from fumehood.store.errors import StoreError

INTERVAL_S = 3600.0


@asynccontextmanager
async def retention(
    log: CallLog, now: Callable[[], datetime], on_fault: Callable[[Exception], None]
) -> AsyncIterator[None]:
    """Keep the log within its bounds for as long as the context lasts."""
    task = asyncio.create_task(_prune_for_ever(log, now, on_fault))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _prune_for_ever(
    log: CallLog, now: Callable[[], datetime], on_fault: Callable[[Exception], None]
) -> None:
    while True:
        try:
            await log.prune(now())
        except StoreError:
            pass  # the database has said so itself
        except Exception as fault:  # the next hour may be a better one
            on_fault(fault)
        with suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S):
                await log.overdue.wait()

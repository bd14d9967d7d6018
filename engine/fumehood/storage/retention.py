"""Retention: old calls and expired blobs go in the background, in small transactions.

Host side, started by the engine. At the start, each hour (oftener where something is kept for
less), and whenever it is overdue: so many
calls were recorded that the log has grown by a tenth, or there was no room for a blob. What
fails is tried again the next time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Protocol

from fumehood.storage.errors import StoreError

INTERVAL_S = 3600.0
MIN_INTERVAL_S = 1.0


class Kept(Protocol):
    """What is kept within bounds."""

    @property
    def overdue(self) -> asyncio.Event:
        """Set when it should not wait for the next hour."""
        ...

    async def prune(self, now: datetime) -> int:
        """Delete what should go. Clears `overdue`."""
        ...


@asynccontextmanager
async def retention(
    kept: Kept,
    now: Callable[[], datetime],
    on_fault: Callable[[Exception], None],
    *,
    kept_s: float = math.inf,
) -> AsyncIterator[None]:
    """Keep it within its bounds for as long as the context lasts.

    `kept_s` is how long each thing is kept: what is kept for a minute is looked at each minute.
    """
    interval_s = min(INTERVAL_S, max(MIN_INTERVAL_S, kept_s))
    task = asyncio.create_task(_prune_for_ever(kept, now, on_fault, interval_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _prune_for_ever(
    kept: Kept,
    now: Callable[[], datetime],
    on_fault: Callable[[Exception], None],
    interval_s: float,
) -> None:
    while True:
        try:
            await kept.prune(now())
        except StoreError:
            pass  # the database has said so itself
        except Exception as fault:  # the next hour may be a better one
            on_fault(fault)
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await kept.overdue.wait()

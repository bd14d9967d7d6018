"""Retention: old calls and expired blobs are deleted in the background, in small transactions.

Host side, started by the engine. Runs at the start, each hour (more often if something is kept for
less), and when it is overdue: the log has grown by a tenth, or a blob found no space. Failures are
retried at the next run.
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
    """A store with limits."""

    @property
    def overdue(self) -> asyncio.Event:
        """Set when the next run should not wait for the hour."""
        ...

    async def prune(self, now: datetime) -> int:
        """Delete expired entries. Clears `overdue`."""
        ...


@asynccontextmanager
async def retention(
    kept: Kept,
    now: Callable[[], datetime],
    on_fault: Callable[[Exception], None],
    *,
    kept_s: float = math.inf,
) -> AsyncIterator[None]:
    """Prune the store while the context lasts.

    `kept_s` is how long an entry is kept: entries kept for a minute are pruned every minute.
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

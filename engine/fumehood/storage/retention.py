"""Retention: old calls and expired blobs are deleted in the background, in small transactions.

Host side, started by the engine. Runs at the start, each hour (more often if something is kept for
less), and when it is overdue: the log has grown by a tenth, or a blob found no space. Failures are
retried at the next run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime

from fumehood.storage.errors import StoreError

INTERVAL_S = 3600.0
MIN_INTERVAL_S = 1.0


Prune = Callable[[datetime], Awaitable[int]]
"""Deletes expired entries of one store; returns their number."""


@asynccontextmanager
async def retention(
    prune: Prune,
    now: Callable[[], datetime],
    on_fault: Callable[[Exception], None],
    *,
    kept_s: float = math.inf,
    overdue: asyncio.Event | None = None,
) -> AsyncIterator[None]:
    """Prune a store while the context lasts.

    `kept_s` is how long an entry is kept: entries kept for a minute are pruned every minute.
    `overdue` is set when the next run should not wait for the hour.
    """
    interval_s = min(INTERVAL_S, max(MIN_INTERVAL_S, kept_s))
    task = asyncio.create_task(
        _prune_for_ever(prune, now, on_fault, interval_s, overdue or asyncio.Event())
    )
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _prune_for_ever(
    prune: Prune,
    now: Callable[[], datetime],
    on_fault: Callable[[Exception], None],
    interval_s: float,
    overdue: asyncio.Event,
) -> None:
    while True:
        overdue.clear()
        try:
            await prune(now())
        except StoreError:
            pass  # the database has reported it
        except Exception as fault:  # tried again at the next run
            on_fault(fault)
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await overdue.wait()

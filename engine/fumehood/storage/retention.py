"""Retention: deletes old calls, blobs and other expired entries in the background.

Host side, started by the engine. Each store is pruned at the engine's start and then every hour, or
more often if its entries are kept for less than an hour. A store is also pruned when it is overdue,
for example because there was no space for a blob. If a run fails, the next run tries again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime

from fumehood.storage.errors import StoreError

INTERVAL_S = 3600.0

Prune = Callable[[datetime], Awaitable[int]]
"""A function that deletes the expired entries of one store and returns the number of these
entries."""


@asynccontextmanager
async def retention(
    prune: Prune,
    now: Callable[[], datetime],
    on_fault: Callable[[Exception], None],
    *,
    kept_s: float = math.inf,
    overdue: asyncio.Event | None = None,
) -> AsyncIterator[None]:
    """Prune a store at once, and then regularly during the block.

    `kept_s` is the number of seconds for which entries are kept. The store is pruned every `kept_s`
    seconds, but at least once an hour. Setting the event `overdue` starts the next run immediately.
    `on_fault` receives unexpected exceptions of `prune`.
    """
    task = asyncio.create_task(
        _prune_for_ever(prune, now, on_fault, min(INTERVAL_S, kept_s), overdue or asyncio.Event())
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
            pass  # the database has already reported this failure
        except Exception as fault:  # the next run tries again
            on_fault(fault)
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await overdue.wait()

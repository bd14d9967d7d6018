"""Carry through: work that is done to its end, also where whoever waits for it is cancelled.

Host side, used where something durable is written and then acted on. A shielded scope is not
enough for that: a call is ended by cancelling its task (`executors/handle`), which no scope holds
up. Invariant: when the cancelling goes on, the work is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Do it in a task of its own, and let a cancelling through once it is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as cancelling:
            cancelled = cancelling
    if cancelled is not None:
        task.exception()  # nobody hears of it: it counts as read
        raise cancelled
    return task.result()

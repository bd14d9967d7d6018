"""Start tasks from callbacks of the event loop, and let tasks finish although their caller is
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from anyio.abc import TaskGroup

T = TypeVar("T")

_starting: set[asyncio.Task[None]] = set()


def start_soon(
    group: TaskGroup, task: Callable[..., Coroutine[Any, Any, Any]], *arguments: object
) -> None:
    """Start a task in a group. Unlike `group.start_soon`, this function also works in an event-loop
    callback, such as the callback for a lost connection.
    """
    # `group.start_soon` alone works in a callback only if the program was started by `anyio.run`.
    # Otherwise, anyio cannot find its event loop in a callback.
    if asyncio.current_task() is not None:
        group.start_soon(task, *arguments)
        return

    async def start() -> None:
        group.start_soon(task, *arguments)

    starting = asyncio.ensure_future(start())
    _starting.add(starting)  # the event loop keeps only weak references
    starting.add_done_callback(_starting.discard)


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a separate task and return its result.

    If the caller is cancelled, `work` continues to its end. Only then, CancelledError is raised.
    """
    # A shielded scope of anyio would not protect `work`, because the engine cancels a call with
    # `Task.cancel` (`executors/base`), and scopes do not delay such a cancellation.
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as cancelling:
            cancelled = cancelling
    if cancelled is not None:
        task.exception()  # mark it as retrieved
        raise cancelled
    return task.result()

"""Starting tasks from callbacks of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from anyio.abc import TaskGroup

_starting: set[asyncio.Task[None]] = set()


def start_soon(
    group: TaskGroup, task: Callable[..., Coroutine[Any, Any, Any]], *arguments: object
) -> None:
    """Start a task in a group, even from an event-loop callback, such as that of a lost connection.

    In a callback, anyio cannot find its event loop unless the program was started by `anyio.run`.
    """
    if asyncio.current_task() is not None:
        group.start_soon(task, *arguments)
        return

    async def start() -> None:
        group.start_soon(task, *arguments)

    starting = asyncio.ensure_future(start())
    _starting.add(starting)  # the event loop keeps only weak references
    starting.add_done_callback(_starting.discard)

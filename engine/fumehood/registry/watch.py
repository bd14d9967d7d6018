"""Watching files of the operator's for as long as the engine runs.

Host side, a task of the engine's for the directory of definitions, and one for the policy.
Looking and reading are done in a thread: a slow file system holds up nobody. Invariant: whatever
a look ends in, there is a next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PERIOD_S = 0.5
"""Between two looks. A change counts at the second look that sees it: a second, about."""


class Watched(Protocol[T_co]):
    """What is looked at."""

    def poll(self) -> T_co | None:
        """What there is now, where that is not what was told last."""
        ...


async def watch(
    watched: Watched[T],
    on_change: Callable[[T], None],
    on_failure: Callable[[Exception], None],
) -> None:
    """Look forever; `on_change` runs on the event loop, between two calls' steps."""
    while True:
        await anyio.sleep(PERIOD_S)
        try:
            contents = await anyio.to_thread.run_sync(watched.poll, abandon_on_cancel=True)
            if contents is not None:
                on_change(contents)
        except Exception as error:
            on_failure(error)

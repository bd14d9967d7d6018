"""Watch the operator's files while the engine runs.

Host side, one task of the engine for the directory of definitions, and one for the policy. Polls
run in a thread, so a slow file system delays no call. Invariant: a failed poll is always followed
by another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PERIOD_S = 0.5
"""Between two polls. A change counts at the second poll that sees it, so after about a second."""


class Watched(Protocol[T_co]):
    """A source that can be polled."""

    def poll(self) -> T_co | None:
        """The current contents, if they differ from the last ones returned."""
        ...


async def watch(
    watched: Watched[T],
    on_change: Callable[[T], None],
    on_failure: Callable[[Exception], None],
) -> None:
    """Poll forever; `on_change` runs on the event loop."""
    while True:
        await anyio.sleep(PERIOD_S)
        try:
            contents = await anyio.to_thread.run_sync(watched.poll, abandon_on_cancel=True)
            if contents is not None:
                on_change(contents)
        except Exception as error:
            on_failure(error)

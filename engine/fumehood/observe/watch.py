"""Watch the operator's files: poll them in a thread until they change.

Host side. A slow file system delays no call. Invariant: a failed poll is always followed by
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread

PERIOD_S = 0.5
"""Seconds between two polls. A change takes effect at the second poll that sees it."""


async def watch(
    poll: Callable[[], Any],
    on_change: Callable[[Any], None],
    on_failure: Callable[[Exception], None],
) -> None:
    """Call `poll` in a thread, again and again, until cancelled.

    `on_change` gets each result of `poll` except None, which means that nothing has changed.
    `on_failure` gets each exception. Both functions run on the event loop.
    """
    while True:
        await anyio.sleep(PERIOD_S)
        try:
            contents = await anyio.to_thread.run_sync(poll, abandon_on_cancel=True)
            if contents is not None:
                on_change(contents)
        except Exception as error:
            on_failure(error)

"""Watching a directory of definitions for as long as the engine runs.

Host side, a task of the engine's. Looking and reading are done in a thread: a slow file system
holds up nobody. Invariant: whatever a look ends in, there is a next one.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.to_thread

from fumehood.registry.directory import DirectoryContents, ToolDirectory

PERIOD_S = 0.5
"""Between two looks. A change counts at the second look that sees it: a second, about."""


async def watch(
    directory: ToolDirectory,
    on_change: Callable[[DirectoryContents], None],
    on_failure: Callable[[Exception], None],
) -> None:
    """Look forever; `on_change` runs on the event loop, between two calls' steps."""
    while True:
        await anyio.sleep(PERIOD_S)
        try:
            contents = await anyio.to_thread.run_sync(directory.poll, abandon_on_cancel=True)
            if contents is not None:
                on_change(contents)
        except Exception as error:
            on_failure(error)

"""Watch the operator's files while the engine runs.

Host side, one task of the engine for the directory of definitions, and one for the policy. Polls
run in a thread, so a slow file system delays no call. Invariant: a failed poll is always followed
by another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

from fumehood.observe.log import Logger, log_fault
from fumehood.registry.directory import DirectoryContents, DirectoryFault, ToolDirectory
from fumehood.registry.index import Source, ToolIndex
from fumehood.registry.registrations import Registrations

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

PERIOD_S = 0.5
"""Seconds between two polls. A change takes effect at the second poll that sees it."""


class Watched(Protocol[T_co]):
    """A source whose changes are found by polling."""

    def poll(self) -> T_co | None:
        """Return the current contents if they differ from the last ones returned, or None."""
        ...


async def watch(
    watched: Watched[T],
    on_change: Callable[[T], None],
    on_failure: Callable[[Exception], None],
) -> None:
    """Poll until cancelled. `on_change` and `on_failure` run on the event loop."""
    while True:
        await anyio.sleep(PERIOD_S)
        try:
            contents = await anyio.to_thread.run_sync(watched.poll, abandon_on_cancel=True)
            if contents is not None:
                on_change(contents)
        except Exception as error:
            on_failure(error)


class WatchedDirectory:
    """Keeps a directory's tools registered. Changes are applied while `follow` runs."""

    def __init__(
        self, path: Path, registry: ToolIndex, registrations: Registrations, log: Logger
    ) -> None:
        self.faults: tuple[DirectoryFault, ...] = ()
        self._registry = registry
        self._registrations = registrations
        self._log = log
        self._directory = ToolDirectory(
            path,
            owner_of=lambda name: registry.owner(name, but=Source.DIRECTORY),
            secrets=registry.secrets,
        )
        self._serve(self._directory.load())

    async def follow(self) -> None:
        """Apply changes until cancelled."""
        await watch(self._directory, self._serve, self._on_failed_look)

    def _serve(self, contents: DirectoryContents) -> None:
        """Register the directory's tools in place of the previous ones. Each fault is logged
        once.
        """
        self._registry.replace_source(Source.DIRECTORY, contents.tools)
        self._registrations.apply_switches()
        for fault in contents.faults:
            if fault not in self.faults:
                self._log.error("tools_directory.left_out", file=fault.file, reason=fault.reason)
        self.faults = contents.faults
        self._log.info(
            "tools_directory.read", tools=len(contents.tools), faulty=len(contents.faults)
        )

    def _on_failed_look(self, error: Exception) -> None:
        log_fault(self._log, "tools_directory.failed", error)

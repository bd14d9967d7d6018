"""The directory of definition files of one engine, whose changes take effect while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from fumehood.definition_files.directory import (
    DirectoryContents,
    DirectoryFault,
    ToolDirectory,
    directory_for,
)
from fumehood.engine_part import EnginePart
from fumehood.observe.log import log_fault
from fumehood.observe.watch import watch
from fumehood.registry.index import Source, ToolIndex
from fumehood.registry.registrations import Registrations

if TYPE_CHECKING:
    from fumehood.compose import Composition


class DefinitionFiles(EnginePart):
    """Registers the tools of the configured directory, and applies changes of the directory while
    the engine runs. `faults` are the current faults of the directory and its files.
    """

    faults: tuple[DirectoryFault, ...] = ()
    _directory: ToolDirectory | None = None

    def add_tools(self, registry: ToolIndex, registrations: Registrations) -> None:
        """Register the tools of the directory, if one is configured."""
        path = self.kernel.config.of("tools_directory", Path)
        if path is None:
            return
        self._registry, self._registrations = registry, registrations
        self._directory = directory_for(registry, path)
        self._serve(self._directory.load())

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Apply changes of the directory while the engine runs."""
        if self._directory is None:
            yield
            return
        on_fault = partial(log_fault, self.kernel.log, "tools_directory.failed")
        async with anyio.create_task_group() as group:
            group.start_soon(watch, self._directory.poll, self._serve, on_fault)
            yield
            group.cancel_scope.cancel()

    def _serve(self, contents: DirectoryContents) -> None:
        """Register the directory's tools in place of its previous tools. Each fault is logged
        once.
        """
        log = self.kernel.log
        self._registry.replace_source(Source.DIRECTORY, contents.tools)
        self._registrations.apply_switches()
        for fault in contents.faults:
            if fault not in self.faults:
                log.error("tools_directory.left_out", file=fault.file, reason=fault.reason)
        self.faults = contents.faults
        log.info("tools_directory.read", tools=len(contents.tools), faulty=len(contents.faults))

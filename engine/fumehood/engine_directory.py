"""The engine's directory of definitions: what it offers, and what in it is wrong.

Part of the composition root. Above it `engine_composition`, below it `registry`.
"""

from __future__ import annotations

from pathlib import Path

from fumehood.observe.log import Logger, log_fault
from fumehood.registry.directory import DirectoryContents, DirectoryFault, ToolDirectory
from fumehood.registry.index import Source, ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.registry.watch import watch


class EngineDirectory:
    """Loads a directory into the registry, and again whenever it changes while `follow` runs."""

    def __init__(
        self, path: Path, registry: ToolIndex, registrations: Registrations, log: Logger
    ) -> None:
        self.faults: tuple[DirectoryFault, ...] = ()
        self._registry = registry
        self._registrations = registrations
        self._log = log
        self._directory = ToolDirectory(
            path, owner_of=lambda name: registry.owner(name, but=Source.DIRECTORY)
        )
        self._serve(self._directory.load())

    async def follow(self) -> None:
        """Until it is cancelled."""
        await watch(self._directory, self._serve, self._on_failed_look)

    def _serve(self, contents: DirectoryContents) -> None:
        """Serve what the directory offers now; what is wrong is logged once."""
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

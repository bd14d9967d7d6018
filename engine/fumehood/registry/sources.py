"""The sources of an engine's tools: packages, the embedding program, administrators, a directory.

Host side, created by `compose`, which reads the sources in this order. The embedding program's
tools must all be valid; a tool of another source that has a fault is left out, and the fault is
logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fumehood.observe.log import Logger
from fumehood.registry.directory import WatchedDirectory
from fumehood.registry.discover import LoadFault, Tool, discover, register_all
from fumehood.registry.index import ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.registry.settings import WebToolSettings
from fumehood.storage.database import Database
from fumehood.storage.errors import understood


@dataclass(frozen=True, slots=True)
class ToolSources:
    """The sources of one engine's tools. `load_faults` are those of tools of packages."""

    load_faults: list[LoadFault]
    registrations: Registrations
    directory: WatchedDirectory | None


def find_tools(
    index: ToolIndex,
    given: Iterable[Tool],
    host_tools: Sequence[str],
    web: WebToolSettings,
    private: Sequence[Path],
    log: Logger,
) -> list[LoadFault]:
    """Register the tools of installed packages, and then the `given` ones.

    Return the faults of tools that were left out. No import path of a sandboxed function may
    contain a `private` directory.

    Raises:
        InvalidDefinition: a given tool is invalid.
    """
    faults = discover(index, host_tools, private=private, web=web)
    index.secrets.report_unusable()
    for fault in faults:
        log.error("tools.left_out", entry_point=fault.entry_point, reason=fault.reason)
    register_all(index, given, private)
    return faults


def read_sources(
    index: ToolIndex,
    load_faults: list[LoadFault],
    database: Database,
    directory: Path | None,
    log: Logger,
) -> ToolSources:
    """Register the tools that earlier runs of the engine registered, and those of a directory.

    Raises:
        DamagedState: the database has invalid rows.
    """
    with understood("definitions of tools"):
        registrations = Registrations(index, database)
    for left_out in registrations.load_faults:
        log.error("tools.left_out", registered=True, reason=left_out.message)
    watched = None
    if directory is not None:
        watched = WatchedDirectory(directory, index, registrations, log)
    return ToolSources(load_faults, registrations, watched)

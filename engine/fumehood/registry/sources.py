"""The kernel's sources of an engine's tools: packages, the embedding program, administrators.

Host side, created by `compose`, which reads the sources in this order. The tools of the embedding
program must all be valid. A faulty tool of another source is left out, and its fault is logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fumehood.observe.log import Logger
from fumehood.registry.discover import LoadFault, Tool, discover, register_all
from fumehood.registry.index import ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.registry.settings import WebToolSettings
from fumehood.storage.database import Database
from fumehood.storage.errors import understood


@dataclass(frozen=True, slots=True)
class ToolSources:
    """Information about the sources of an engine's tools. `load_faults` contains the reasons why
    tools of installed packages were left out. `registrations` manages the tools that administrators
    register.
    """

    load_faults: list[LoadFault]
    registrations: Registrations


def find_tools(
    index: ToolIndex,
    given: Iterable[Tool],
    host_tools: Sequence[str],
    web: WebToolSettings,
    private: Sequence[Path],
    log: Logger,
) -> list[LoadFault]:
    """Register the tools of installed packages, and then the tools in `given`, which come from the
    embedding program. Return the reasons why tools of packages were left out.

    `host_tools` are the names of packages' tools that may run on the host. A sandboxed function is
    refused if its import path contains a `private` directory.

    Raises:
        InvalidDefinition: a tool in `given` is invalid.
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
    log: Logger,
) -> ToolSources:
    """Register the tools that administrators registered in earlier runs of the engine. Return these
    registrations together with `load_faults`, which is the result of `find_tools`.

    Raises:
        DamagedState: the database has invalid rows.
    """
    with understood("definitions of tools"):
        registrations = Registrations(index, database)
    for left_out in registrations.load_faults:
        log.error("tools.left_out", registered=True, reason=left_out.message)
    return ToolSources(load_faults, registrations)

"""The public `Engine`: the kernel's engine with the methods that parts add.

The kernel and the daemon's own routes use `engine.py` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fumehood.engine import Engine as KernelEngine
from fumehood.parts import with_methods

if TYPE_CHECKING:
    from fumehood.audit.engine import EngineWithAudit as AuditedEngine
    from fumehood.batches.engine import EngineWithBatches as BatchingEngine
    from fumehood.formats.engine import EngineWithFormats as HandlingEngine
    from fumehood.projects.engine import EngineWithProjects as CopyingEngine
    from fumehood.snapshots.engine import EngineWithSnapshots as ForkingEngine
    from fumehood.streams.engine import EngineWithStreams as StreamingEngine
    from fumehood.workspace.engine import EngineWithFiles as EngineOfFiles

    class EngineOfParts(
        AuditedEngine,
        BatchingEngine,
        HandlingEngine,
        CopyingEngine,
        ForkingEngine,
        StreamingEngine,
        EngineOfFiles,
    ): ...

else:
    EngineOfParts = with_methods(KernelEngine)


class Engine(EngineOfParts):
    """Runs tools behind their gates and walls.

        async with Engine(tools=[send_invoice]) as engine:
            envelope = await engine.call("calculator", {"expression": "5! + 2**10"})

    State that must survive the process is kept in `database` (`open_database`); without one it is
    kept in memory until the engine ends.

    `tools` come from the embedding program, which is the operator: functions made by `@tool`,
    definitions, or documents of definitions. Built-in tools, entry points and the files of
    `tools_directory` are found automatically; the files are watched while the engine runs. Spans
    of calls go to `tracer_provider`, an OpenTelemetry provider that the program shuts down itself;
    with "environment" to the collector that OpenTelemetry's variables name.

    Raises:
        InvalidDefinition: a tool of `tools` is wrong; with all its faults.
        PolicyError: the configuration's `policy_file` cannot be used; with all faults.
    """

"""The public `Engine`: the engine of `engine.py` with the methods that parts add.

The daemon's own routes use only `engine.py`.
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
    """Runs tools in sandboxes, after checks of each call.

        async with Engine(tools=[send_invoice]) as engine:
            envelope = await engine.call("calculator", {"expression": "5! + 2**10"})

    State that must survive the process is kept in `database`, which `open_database` opens. Without
    a `database`, the state is kept in memory until the engine ends.

    `tools` are the tools of the embedding program, which is the operator: functions made by
    `@tool`, definitions, or documents of definitions. The engine itself finds built-in tools, entry
    points and the files of `tools_directory`, and watches these files while it runs. Spans of calls
    are sent to `tracer_provider`, an OpenTelemetry provider that the program itself shuts down. If
    `tracer_provider` is "environment", spans are sent to the collector that OpenTelemetry's
    environment variables name.

    Raises:
        InvalidDefinition: a tool in `tools` is invalid. The error contains all faults of the tool.
        PolicyError: the configuration's `policy_file` cannot be used. The error contains all
            faults.
    """

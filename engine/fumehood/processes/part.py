"""Declaration of the part `processes`: background processes in sessions."""

from __future__ import annotations

from fumehood.core.part import Command, Part, ToolKind

EXECUTORS = "fumehood.processes.executors"
ARGUMENTS = "fumehood.processes.arguments"


def _kind(executor: str, arguments: str) -> ToolKind:
    return ToolKind(
        executor=f"{EXECUTORS}:{executor}",
        arguments=f"{ARGUMENTS}:{arguments}",
        place="container",
        why="It works on the processes of a session, which run in its container.",
    )


PART = Part(
    name="processes",
    commands={
        "sessions start": Command(
            "Start a background process in a session, with the tool start_process.",
            "fumehood.processes.command:start_process",
            after="fork",
            takes_options=True,
        ),
        "sessions ps": Command(
            "List the background processes of a session: running ones, and the last ended ones.",
            "fumehood.processes.command:list_processes",
            after="start",
        ),
        "sessions logs": Command(
            "Show the output of a session's process, of which the last megabyte is kept.",
            "fumehood.processes.command:show_output",
            after="ps",
        ),
        "sessions stop-process": Command(
            "End a process of a session and everything that it has started.",
            "fumehood.processes.command:stop_process",
            after="logs",
        ),
    },
    operations="fumehood.processes.routes:OPERATIONS",
    control_operations="fumehood.processes.routes:CONTROL_OPERATIONS",
    executors={
        "process:start": _kind("StartExecutor", "StartArguments"),
        "process:list": _kind("ListExecutor", "NoArguments"),
        "process:read": _kind("ReadExecutor", "ReadArguments"),
        "process:write": _kind("WriteExecutor", "WriteArguments"),
        "process:stop": _kind("StopExecutor", "StopArguments"),
    },
    in_engine="fumehood.processes.in_engine:ProcessesPart",
)

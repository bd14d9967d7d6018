"""Declaration of the part `projects`, which copies directories of the host into sessions and
back.
"""

from __future__ import annotations

from fumehood.core.part import Command, Part, ToolKind

PLACE = "container"
WHY = "The engine compares the session's files with the project directory, and writes there."

PART = Part(
    name="projects",
    commands={
        "sessions diff": Command(
            "Show what has changed in a session since its project was copied in, as git diff does.",
            "fumehood.projects.command:show_diff",
            after="fork",
        ),
        "sessions apply": Command(
            "Ask for a session's changes to be written into the project. An approver sees the "
            "diff.\n\n"
            "Exit status: 0 written, 1 not written, 3 waiting for approval, 4 engine unavailable.",
            "fumehood.projects.command:apply_changes",
            after="diff",
        ),
    },
    operations="fumehood.projects.routes:OPERATIONS",
    control_operations="fumehood.projects.routes:CONTROL_OPERATIONS",
    session_fields={"project": "fumehood.projects.home:shown"},
    methods={
        "AsyncClient": "fumehood.projects.async_client:AsyncClientWithProjects",
        "Client": "fumehood.projects.sync.client:ClientWithProjects",
        "Engine": "fumehood.projects.engine:EngineWithProjects",
    },
    executors={
        "workspace:diff": ToolKind(
            executor="fumehood.projects.executors:ProjectDiffExecutor",
            arguments="fumehood.core.arguments:NoArguments",
            place=PLACE,
            why=WHY,
        ),
        "workspace:apply": ToolKind(
            executor="fumehood.projects.executors:ProjectApplyExecutor",
            arguments="fumehood.core.arguments:NoArguments",
            place=PLACE,
            why=WHY,
        ),
    },
    in_engine="fumehood.projects.in_engine:ProjectsPart",
)

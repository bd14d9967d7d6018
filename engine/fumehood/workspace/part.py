"""Declaration of the part `workspace`, which gives access to the files of sessions."""

from __future__ import annotations

from fumehood.core.part import Command, Part, ToolKind


def _kind(executor: str, arguments: str) -> ToolKind:
    return ToolKind(
        executor=f"fumehood.workspace.executors:{executor}",
        arguments=f"fumehood.workspace.arguments:{arguments}",
        place="container",
        why="It works on the files of a session, which are in its container.",
    )


PART = Part(
    name="workspace",
    commands={
        "sessions files": Command(
            "List the files of a session, by path.",
            "fumehood.workspace.command:list_files",
            after="port",
        ),
        "sessions get": Command(
            "Copy a file or a directory from a session. It is saved completely, or not at all.",
            "fumehood.workspace.command:get_file",
            after="files",
        ),
        "sessions put": Command(
            "Copy a file or a directory into a session. Existing files are replaced, unless "
            "--create is given for one file. Links in a directory are left out.",
            "fumehood.workspace.command:put_file",
            after="get",
        ),
        "sessions rm": Command(
            "Delete a file, link or directory in a session.",
            "fumehood.workspace.command:delete_file",
            after="put",
        ),
    },
    operations="fumehood.workspace.routes:OPERATIONS",
    control_operations="fumehood.workspace.routes:CONTROL_OPERATIONS",
    methods={
        "AsyncClient": "fumehood.workspace.async_client:AsyncClientWithFiles",
        "Client": "fumehood.workspace.sync.client:ClientWithFiles",
        "Engine": "fumehood.workspace.engine:EngineWithFiles",
    },
    executors={
        "workspace:read": _kind("WorkspaceExecutor", "ReadArguments"),
        "workspace:write": _kind("PreviewedExecutor", "WriteArguments"),
        "workspace:list": _kind("WorkspaceExecutor", "ListArguments"),
        "workspace:delete": _kind("PreviewedExecutor", "DeleteArguments"),
    },
    in_engine="fumehood.workspace.in_engine:WorkspacePart",
)

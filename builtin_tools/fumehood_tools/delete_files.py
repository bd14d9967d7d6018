"""`delete_files`: files of a session's workspace, for good. Dangerous: a human decides.

Only the definition stands here. It runs in the session's container, by the guest's own program
for files; no code of anybody's runs.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

_PATHS = {"type": "array", "items": {"type": "string"}}

delete_files = ToolDefinition(
    name="delete_files",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Delete files and directories of the session's working directory for good; each call "
        "needs the approval of a human. Only in a session (session_id). Use it where the user "
        "asked for something to be gone. Not to clean up after oneself: a session's files end "
        "with the session. A symbolic link is deleted itself, not what it leads to."
    ),
    parameters=argument_schema("workspace:delete"),
    output_schema={
        "type": "object",
        "required": ["deleted", "missing", "failed"],
        "properties": {
            "deleted": {**_PATHS, "description": "Those that are gone now."},
            "missing": {**_PATHS, "description": "Those that were not there."},
            "failed": {"type": "array", "description": "Those that are still there."},
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=({"paths": ["old.csv"]}, {"paths": ["build"], "recursive": True}),
    category="files",
    tags=("files", "session"),
    executor="workspace:delete",
    dangerous=True,
    estimated_tokens=200,
)

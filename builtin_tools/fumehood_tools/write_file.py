"""`write_file`: a file into a session's workspace.

Only the definition stands here. It runs in the session's container, by the guest's own program
for files; no code of anybody's runs.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

write_file = ToolDefinition(
    name="write_file",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Write a file into the session's working directory, where programs of later calls find "
        "it. Directories are made as needed. A file that is there is not touched unless mode "
        "says so. Only in a session (session_id). Use it to save a text, a script or data that "
        "later calls work on. Not for a file that only one call needs (its argument files), "
        "and not for the user's own files: nothing outside of the session changes."
    ),
    parameters=argument_schema("workspace:write"),
    output_schema={
        "type": "object",
        "required": ["path", "size"],
        "properties": {
            "path": {"type": "string", "description": "The path that was written."},
            "size": {"type": "integer", "description": "Bytes of the file now."},
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=(
        {"path": "notes.txt", "content": "first line\n"},
        {"path": "notes.txt", "content": "second line\n", "mode": "append"},
    ),
    category="files",
    tags=("files", "session"),
    executor="workspace:write",
    estimated_tokens=200,
)

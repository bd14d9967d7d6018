"""`write_file`: a file into a session's workspace.

Only the definition stands here. It runs in the session's container, by the guest's own program
for files; no code of anybody's runs.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType

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
    parameters={
        "type": "object",
        "additionalProperties": False,
        "required": ["path"],
        "properties": {
            "path": {
                "type": "string",
                "minLength": 1,
                "maxLength": 4096,
                "description": "Relative path, such as 'data/input.csv'.",
            },
            "content": {"type": "string", "description": "The content as text."},
            "content_base64": {
                "type": "string",
                "description": "Or the content as base64; one of the two.",
            },
            "mode": {
                "enum": ["create", "replace", "append"],
                "description": "create (the default) refuses where there is one already.",
            },
        },
    },
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

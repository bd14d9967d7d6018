"""`read_file`: a file of a session's workspace, or a part of it.

Only the definition stands here. It runs in the session's container, by the guest's own program
for files; no code of anybody's runs.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

read_file = ToolDefinition(
    name="read_file",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Read a file of the session's working directory: one that a program wrote there or that "
        "was put there. Gives its text, or base64 where it is no text of UTF-8, its size, and "
        "where to go on with the next part (next_offset). Only in a session (session_id). Use "
        "it for text that is to be seen as it is. Not for large or binary files: let run_python "
        "or run_shell look at those and print what matters. It follows no symbolic link."
    ),
    parameters=argument_schema("workspace:read"),
    output_schema={
        "type": "object",
        "required": ["path", "size", "has_more", "next_offset"],
        "properties": {
            "path": {"type": "string", "description": "The path that was asked for."},
            "content": {"type": "string", "description": "The text."},
            "content_base64": {"type": "string", "description": "Or the bytes as base64."},
            "size": {"type": "integer", "description": "Bytes of the whole file."},
            "has_more": {"type": "boolean", "description": "Whether there is more of it."},
            "next_offset": {
                "type": ["integer", "null"],
                "description": "The offset of the rest; null at the end.",
            },
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=({"path": "out.txt"}, {"path": "log.txt", "offset": 10_240}),
    category="files",
    tags=("files", "session"),
    executor="workspace:read",
    read_only=True,
    estimated_tokens=3000,
)

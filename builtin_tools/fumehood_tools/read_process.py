"""`read_process`: what a process of a session has printed.

Only the definition stands here. The guest keeps the process in the session's container.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

read_process = ToolDefinition(
    name="read_process",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Read what a process has printed, both streams together, from an offset on. Only in a "
        "session (session_id). The last megabyte is kept. Give the answer's offset as after to "
        "read what comes next."
    ),
    parameters=argument_schema("process:read"),
    output_schema={
        "type": "object",
        "required": ["text", "offset", "skipped", "ended"],
        "properties": {
            "text": {"type": "string", "description": "At most 64 KB."},
            "offset": {"type": "integer", "description": "Bytes read so far: the next after."},
            "skipped": {"type": "integer", "description": "Bytes before text that are gone."},
            "ended": {
                "type": "boolean",
                "description": "Whether nothing follows.",
            },
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=({"name": "server"}, {"name": "server", "after": 2048}),
    category="code",
    tags=("shell", "session"),
    executor="process:read",
    read_only=True,
    estimated_tokens=1000,
)

"""`list_processes`: what runs beside the calls of a session.

Only the definition stands here. The guest keeps the process in the session's container.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema
from fumehood_tools.start_process import PROCESS

list_processes = ToolDefinition(
    name="list_processes",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "List the processes that were started with start_process, and the last ones that have "
        "ended. Only in a session (session_id). Use it to see whether a server still runs."
    ),
    parameters=argument_schema("process:list"),
    output_schema={
        "type": "object",
        "required": ["processes"],
        "properties": {
            "processes": {"type": "array", "items": PROCESS},
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=({},),
    category="code",
    tags=("shell", "session"),
    executor="process:list",
    read_only=True,
    estimated_tokens=200,
)

"""`start_process`: a program that runs beside the calls of a session, such as a server.

Only the definition stands here. The guest keeps the process in the session's container.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

PROCESS = {
    "type": "object",
    "required": ["name", "state", "exit_code", "signal", "started_at"],
    "properties": {
        "name": {"type": "string"},
        "state": {"enum": ["running", "ended"], "description": "running: something of it lives."},
        "exit_code": {"type": ["integer", "null"], "description": "Of its first process."},
        "signal": {"type": ["integer", "null"], "description": "That ended its first process."},
        "lost": {"type": "boolean", "description": "Killed for lack of memory, with its output."},
        "started_at": {"type": "string", "description": "ISO 8601."},
    },
}

OF_ONE = {
    "type": "object",
    "required": ["process"],
    "properties": {"process": PROCESS, "session": SESSION_OUTPUT},
}

start_process = ToolDefinition(
    name="start_process",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Start a program that goes on running after this call, such as a development server or a "
        "watcher, and give it a name. Only in a session (session_id). It runs beside calls and "
        "shares their files, memory and network addresses (localhost), but has no network. Read "
        "what it prints with read_process, end it with stop_process. Not for a command whose "
        "result is needed now (run_shell)."
    ),
    parameters=argument_schema("process:start"),
    output_schema=OF_ONE,
    input_examples=({"name": "server", "command": "python3 -m http.server 8000"},),
    category="code",
    tags=("shell", "session"),
    executor="process:start",
    estimated_tokens=100,
)

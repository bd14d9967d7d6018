"""`stop_process`: the end of a process of a session.

Only the definition stands here. The guest keeps the process in the session's container.
"""

from fumehood import ToolDefinition, ToolType, argument_schema
from fumehood_tools.start_process import OF_ONE

stop_process = ToolDefinition(
    name="stop_process",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "End a process and everything that it has started: SIGTERM, and SIGKILL after a while. "
        "Only in a session (session_id). What it printed can still be read."
    ),
    parameters=argument_schema("process:stop"),
    output_schema=OF_ONE,
    input_examples=({"name": "server"},),
    category="code",
    tags=("shell", "session"),
    executor="process:stop",
    estimated_tokens=100,
)

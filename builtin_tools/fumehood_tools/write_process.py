"""`write_process`: input for a process of a session.

Only the definition stands here. The guest keeps the process in the session's container.
"""

from fumehood import ToolDefinition, ToolType, argument_schema
from fumehood_tools.start_process import OF_ONE

write_process = ToolDefinition(
    name="write_process",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Send text to the standard input of a process, or close it. Only in a session "
        "(session_id). Use it for a program that asks or reads commands; end a line with \\n."
    ),
    parameters=argument_schema("process:write"),
    output_schema=OF_ONE,
    input_examples=({"name": "repl", "text": "print(1)\n"},),
    category="code",
    tags=("shell", "session"),
    executor="process:write",
    estimated_tokens=100,
)

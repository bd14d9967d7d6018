"""`apply_workspace`: the changes of a session, into the project on the host. Dangerous: a human
sees the diff, and decides.

Only the definition stands here. The engine writes all changes, or none.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema
from fumehood_tools.workspace_diff import PROJECT_FILES

apply_workspace = ToolDefinition(
    name="apply_workspace",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Write the changes of the session into the user's project; each call needs the approval "
        "of a human, who sees the diff. Only in a session (session_id). It must have been made "
        "from a project directory. Use it when the work is done and tested. All files are "
        "written, or none; if the user has changed one of them meanwhile, none is."
    ),
    parameters=argument_schema("workspace:apply"),
    output_schema={
        "type": "object",
        "required": ["directory", "files"],
        "properties": {
            "directory": {"type": "string", "description": "The project's name."},
            "files": {**PROJECT_FILES, "description": "Each file that was written or deleted."},
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=({},),
    category="files",
    tags=("files", "session"),
    executor="workspace:apply",
    dangerous=True,
    estimated_tokens=500,
)

"""`workspace_diff`: what has changed in a session's project.

Only the definition stands here. The engine compares the session's files with what was copied in.
"""

from fumehood import SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

PROJECT_FILES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["path", "change", "bytes"],
        "properties": {
            "path": {"type": "string", "description": "Relative path."},
            "change": {"enum": ["added", "modified", "deleted", "renamed", "mode"]},
            "bytes": {"type": "integer", "description": "Size of the file."},
            "old_path": {"type": "string", "description": "The earlier path of a renamed file."},
            "conflict": {"type": "string", "description": "Why it cannot be applied."},
        },
    },
}

workspace_diff = ToolDefinition(
    name="workspace_diff",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "Show what has changed in the project since it was copied into the session, as git diff "
        "does. Only in a session (session_id). It must have been made from a project directory. "
        "Use it before apply_workspace. What .gitignore leaves out is not shown."
    ),
    parameters=argument_schema("workspace:diff"),
    output_schema={
        "type": "object",
        "required": ["diff", "files", "truncated", "unseen"],
        "properties": {
            "diff": {"type": "string", "description": "The changes, in git's format."},
            "files": {**PROJECT_FILES, "description": "Each changed file."},
            "truncated": {"type": "boolean", "description": "Whether diff is not complete."},
            "unseen": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Links out of the project and special files: never applied.",
            },
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=({},),
    category="files",
    tags=("files", "session"),
    executor="workspace:diff",
    read_only=True,
    estimated_tokens=2000,
)

"""`list_files`: what is in a session's workspace.

Only the definition stands here. It runs in the session's container, by the guest's own program
for files; no code of anybody's runs.
"""

from fumehood import PAGINATION_OUTPUT, SESSION_OUTPUT, ToolDefinition, ToolType, argument_schema

list_files = ToolDefinition(
    name="list_files",
    version="1.0.0",
    type=ToolType.BUILTIN,
    description=(
        "List the files and directories of the session's working directory, or of one directory "
        "in it, in the order of their paths, a page at a time. Only in a session (session_id). "
        "Use it to see what earlier calls left there. Not to search in files (run_shell)."
    ),
    parameters=argument_schema("workspace:list"),
    output_schema={
        "type": "object",
        "required": ["items", "pagination"],
        "properties": {
            "items": {
                "type": "array",
                "description": "What is there.",
                "items": {
                    "type": "object",
                    "required": ["path", "kind", "size", "modified_at"],
                    "properties": {
                        "path": {"type": "string", "description": "Relative path."},
                        "kind": {"enum": ["file", "directory", "link", "other"]},
                        "size": {"type": "integer", "description": "Bytes."},
                        "modified_at": {"type": "string", "description": "ISO 8601."},
                    },
                },
            },
            "pagination": PAGINATION_OUTPUT,
            "session": SESSION_OUTPUT,
        },
    },
    input_examples=({}, {"path": "data", "recursive": True, "limit": 100}),
    category="files",
    tags=("files", "session"),
    executor="workspace:list",
    read_only=True,
    estimated_tokens=500,
)

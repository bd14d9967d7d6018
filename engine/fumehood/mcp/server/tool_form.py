"""Converts a tool to the form that MCP's `tools/list` requires."""

from __future__ import annotations

import re

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition, ToolType

_KEPT = re.compile(
    r"Nothing is kept for the next call, unless it is made in a session \(session_id\): "
    r"that keeps ([^.]*)\."
)
"""Matches the sentence about sessions in the description of a built-in tool. The sentence is wrong
for MCP, where calls have no option `session_id`.
"""

_NOT_KEPT = "Nothing is kept for the next call."


def tool_to_mcp(
    tool: ToolDefinition, *, with_output: bool = True, in_session: bool = False
) -> JsonObject:
    """Return a tool in the form of `tools/list`.

    `with_output` adds the output schema, which protocol versions before 2025-06-18 do not support.
    `in_session` says that the client's calls run in a session. The description then mentions the
    session.
    """
    kept = r"For the next call the session keeps \1." if in_session else _NOT_KEPT
    description = _KEPT.sub(kept, tool.description)
    shape: JsonObject = {
        "name": tool.name,
        "description": description.replace("Only in a session (session_id). ", ""),
        "inputSchema": {**tool.parameters, "type": "object"},
        "annotations": {
            "readOnlyHint": tool.read_only,
            "destructiveHint": tool.dangerous,
            "idempotentHint": tool.idempotent,
            "openWorldHint": tool.type in (ToolType.REST, ToolType.MCP),
        },
    }
    if with_output and tool.output_schema is not None:
        output = {**tool.output_schema, "type": "object"}
        # If a text was shortened, `data` contains notes about it beside the tool's own fields.
        output.pop("additionalProperties", None)
        shape["outputSchema"] = output
    return shape

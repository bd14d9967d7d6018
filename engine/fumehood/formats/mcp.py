"""A tool as the Model Context Protocol describes it.

Host side, used by `mcp/server.py`, and by exports of tools. Nothing here says how a tool runs.
"""

from __future__ import annotations

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition, ToolType


def tool_to_mcp(tool: ToolDefinition, *, with_output: bool = True) -> JsonObject:
    """The tool in a result of `tools/list`; protocols before 2025-06-18 know no output schema."""
    shape: JsonObject = {
        "name": tool.name,
        "description": tool.description,
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
        # `data` has notes beside the tool's own fields where a text was shortened.
        output.pop("additionalProperties", None)
        shape["outputSchema"] = output
    return shape

"""A tool as the Model Context Protocol shows it."""

from __future__ import annotations

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition, ToolType


def tool_to_mcp(tool: ToolDefinition) -> JsonObject:
    """One item of `tools/list`. Nothing in it says how the tool runs."""
    made: JsonObject = {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": tool.parameters,
        "annotations": {
            "readOnlyHint": tool.read_only,
            "destructiveHint": tool.dangerous,
            "idempotentHint": tool.idempotent,
            "openWorldHint": tool.type in (ToolType.REST, ToolType.MCP),
        },
    }
    if tool.output_schema is not None and tool.output_schema.get("type") == "object":
        made["outputSchema"] = tool.output_schema  # the protocol takes objects only
    return made

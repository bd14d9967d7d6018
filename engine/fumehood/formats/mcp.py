"""A tool as the Model Context Protocol describes it, and arguments as its clients send them.

Host side, used by `mcp/server.py`, and by exports of tools. Nothing here says how a tool runs.
"""

from __future__ import annotations

from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition, ToolType
from fumehood.registry.json_schema import CompiledSchema, TooCostly

SHARED_SCHEMAS = ("$defs", "definitions")


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


def without_nulls(parameters: JsonObject, arguments: JsonObject) -> JsonObject:
    """The arguments without each null for an optional parameter that takes none.

    Clients that make a model of a schema send null for everything that was left out.
    """
    if None not in arguments.values():
        return arguments
    required, properties = parameters.get("required", ()), parameters.get("properties", {})
    shared = {key: parameters[key] for key in SHARED_SCHEMAS if key in parameters}
    return {
        name: value
        for name, value in arguments.items()
        if value is not None
        or name in required
        or name not in properties
        or _takes_null(properties[name], shared)
    }


def _takes_null(schema: Any, shared: JsonObject) -> bool:
    if not isinstance(schema, dict):
        return True
    try:
        return not CompiledSchema({**schema, **shared}).violations(None)
    except TooCostly:
        return True

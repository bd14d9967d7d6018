"""A tool as MCP describes it."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood import ToolDefinition
from fumehood.mcp.server.tool_form import tool_to_mcp
from support.definitions import expression_document

pytestmark = pytest.mark.row("D3")


def shape_of(**fields: Any) -> dict[str, Any]:
    return tool_to_mcp(ToolDefinition(**expression_document(**fields)))


def test_mcp_annotations_follow_the_definition() -> None:
    assert shape_of(read_only=True)["annotations"] == {
        "readOnlyHint": True, "destructiveHint": False, "idempotentHint": True,
        "openWorldHint": False,
    }  # fmt: skip
    dangerous = shape_of(dangerous=True)["annotations"]
    assert (dangerous["destructiveHint"], dangerous["readOnlyHint"]) == (True, False)


@pytest.mark.parametrize(("kind", "is_open"), [("REST", True), ("MCP", True), ("NATIVE", False)])
def test_remote_tools_have_the_open_world_hint(kind: str, is_open: bool) -> None:
    fields = {**expression_document(), "type": kind}
    fields.pop("executor", None)
    shape = tool_to_mcp(ToolDefinition.model_validate(fields))
    assert shape["annotations"]["openWorldHint"] is is_open


def test_mcp_tool_hides_how_it_runs() -> None:
    shape = shape_of(output_schema={"type": "object"}, tags=["t"], timeout_seconds=3)
    assert shape.keys() == {"name", "description", "inputSchema", "outputSchema", "annotations"}


def test_exported_output_schema_allows_truncation_notes() -> None:
    schema = {"properties": {"a": {"type": "string"}}, "additionalProperties": False}
    expected = {"properties": schema["properties"], "type": "object"}
    assert shape_of(output_schema=schema)["outputSchema"] == expected
    tool = ToolDefinition(**expression_document(output_schema=schema))
    assert "outputSchema" not in tool_to_mcp(tool, with_output=False)

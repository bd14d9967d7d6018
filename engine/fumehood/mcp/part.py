"""The Model Context Protocol as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(name="mcp", exports={"mcp": "fumehood.mcp.tool_form:tool_to_mcp"})

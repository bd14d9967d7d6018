"""The Model Context Protocol as a part of the product."""

from __future__ import annotations

from fumehood.core.part import Command, Part

PART = Part(
    name="mcp",
    commands={
        "mcp": Command(
            "Serve an MCP client over standard input and output.",
            "fumehood.mcp.command:mcp",
            after="replay",
        )
    },
    exports={"mcp": "fumehood.mcp.server.tool_form:tool_to_mcp"},
    mounts={"/mcp": "fumehood.mcp.server.endpoint:McpEndpoint"},
)

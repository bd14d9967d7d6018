"""Declaration of the part `mcp`, which adds the Model Context Protocol to the engine."""

from __future__ import annotations

from fumehood.core.part import Command, Part, ToolKind

PART = Part(
    name="mcp",
    after=("gateway", "outgoing"),
    settings="fumehood.mcp.client.settings:SETTINGS",
    commands={
        "mcp": Command(
            "Serve an MCP client over standard input and output.",
            "fumehood.mcp.command:mcp",
            after="replay",
        )
    },
    exports={"mcp": "fumehood.mcp.server.tool_form:tool_to_mcp"},
    executors={
        "mcp": ToolKind(
            executor="fumehood.mcp.client.executor:McpExecutor",
            type="MCP",
            fields=frozenset({"endpoint", "headers", "timeout"}),  # the protocol fixes the method
            place="MCP server",
            why="A server of the Model Context Protocol runs it.",
            recipient="server",
        )
    },
    coming="fumehood.mcp.client.settings:coming",
    in_engine="fumehood.mcp.client.in_engine:McpClient",
    mounts={"/mcp": "fumehood.mcp.server.endpoint:McpEndpoint"},
)

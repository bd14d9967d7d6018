"""The engine as an MCP server: `/mcp` of the daemon, and the stdio bridge of `fumehood mcp`."""

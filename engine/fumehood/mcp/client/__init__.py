"""MCP servers of the configuration, whose tools the engine calls."""

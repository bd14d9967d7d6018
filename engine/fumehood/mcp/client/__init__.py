"""The MCP servers that the configuration names, and whose tools the engine calls."""

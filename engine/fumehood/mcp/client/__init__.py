"""The engine as an MCP client: it calls tools of the MCP servers that the configuration names."""

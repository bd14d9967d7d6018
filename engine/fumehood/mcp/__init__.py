"""The Model Context Protocol: the daemon's server, and the stdio bridge of `fumehood mcp`."""

"""The engine as an MCP server: `/mcp` of the daemon, and the bridge to standard input and output of
`fumehood mcp`.
"""

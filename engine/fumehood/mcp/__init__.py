"""The Model Context Protocol, MCP (a part): the engine as an MCP server, and the MCP servers whose
tools the engine calls.
"""

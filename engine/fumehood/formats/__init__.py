"""How model providers write tools and calls: exports, calls of an assistant message, results.

Each provider is one file with one class (`base.Format`); `table.py` lists them. `schemas.py` fits a
tool's parameters to what a provider takes. `exports.py` keeps what was exported, and
`agent_loop.py` drives a model. Nothing here runs a tool: `pipeline/tool_calls.py` does.
"""

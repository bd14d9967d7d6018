"""Formats of model providers: exported tools, calls in an assistant's message, and results.

Each provider is one file with one class (`base.Format`); `table.py` lists them. `schemas.py`
converts a tool's parameters to a provider's dialect. `exports.py` caches exported tools, and
`agent_loop.py` drives a model. Nothing here runs a tool: `message_calls.py` passes the calls of a
message to `pipeline/batch.py`, which runs each call as if it had been sent alone.
"""

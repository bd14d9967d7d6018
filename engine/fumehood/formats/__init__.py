"""The formats of model providers, for exported tools, for calls in an assistant's message, and for
results.

Each provider has one module with a subclass of `base.Format`, and `table.py` lists the classes.
`schemas.py` converts a tool's parameters to a provider's dialect. `exports.py` caches exported
tools, and `agent_loop.py` drives a model. This package does not run tools itself:
`message_calls.py` passes the calls of a message to `batches/batch.py`, which runs each call as if
it had been sent alone.
"""

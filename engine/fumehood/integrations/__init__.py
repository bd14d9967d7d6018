"""Adapters that make fumehood the sandbox of agent frameworks. Each framework has one module.

Client side. Each module imports its framework, so importing this package imports none of its
modules. Invariant: an adapter uses the daemon like any other client, so all checks apply. One
adapter object runs all code in the same session.
"""

"""Adapters: fumehood as the sandbox of agent frameworks, one module for each framework.

Client side. Each module imports its framework, so this package does not import its modules.
Invariant: an adapter uses a daemon as any client does, so all checks apply. All code that one
adapter object runs is run in the same session.
"""

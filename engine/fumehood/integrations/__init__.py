"""Adapters: fumehood as the sandbox of agent frameworks, one module for each framework.

Client side. A module imports its framework, so this package imports none of the modules. Invariant:
an adapter talks to a daemon as any client does, so all checks apply. Code that an adapter runs
shares one session.
"""

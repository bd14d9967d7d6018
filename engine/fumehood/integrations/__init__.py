"""Adapters: fumehood as the sandbox of agent frameworks. Each module is one framework's.

Client side. A module imports its framework, so this package imports none of them. Invariant: an
adapter talks to a daemon as any client does, so every gate holds. What it runs is in one session.
"""

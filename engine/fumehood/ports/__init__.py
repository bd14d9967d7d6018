"""Ports: connections from outside the engine to servers that run in a session."""

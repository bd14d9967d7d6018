"""Ports: the way from outside to servers in a session."""

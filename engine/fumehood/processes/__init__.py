"""Processes: programs that run in a session beside its calls."""

"""Approvals: calls that wait for people, from the question to the run after the yes."""

"""Runs programs of each language, each in its own child process."""

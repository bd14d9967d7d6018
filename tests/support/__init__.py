"""Helpers that only the tests use."""

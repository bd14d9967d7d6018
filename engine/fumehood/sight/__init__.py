"""Metrics, alerts and traces of calls that have ended."""

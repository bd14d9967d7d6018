"""Observation: the structured log, metrics, alerts and traces, and clocks and identifiers."""

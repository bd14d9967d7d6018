"""Observation: the structured log, clocks and identifiers, and the trace of one call."""

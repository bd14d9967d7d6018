"""Observation of the engine: the structured log, metrics, alerts and traces; clocks and
identifiers.
"""

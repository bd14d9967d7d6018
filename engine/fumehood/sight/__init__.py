"""The part for metrics, alerts and traces of calls that have ended."""

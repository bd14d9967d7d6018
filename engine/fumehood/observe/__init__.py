"""Sight: logs, and the trail of each call."""

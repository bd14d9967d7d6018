"""Redaction: secrets, and what matches the operator's patterns, are replaced in everything that
leaves the engine.
"""

from __future__ import annotations

"""Redaction: secrets and private patterns are replaced in all that leaves the engine."""

from __future__ import annotations

"""Redaction: replace secrets and the operator's patterns in everything that leaves the engine."""

from __future__ import annotations

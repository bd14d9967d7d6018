"""The desk's rules: what the operator chose for calls that wait for a human.

Host side. Values only; the engine makes them of its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeskRules:
    """What the operator chose."""

    expire_s: float = 3600
    start_within_s: float = 300
    warn_s: float = 300
    max_wait_s: float = 600
    max_pending: int = 10_000
    max_pending_of_one: int = 1000
    max_pending_bytes_of_one: int = 64 << 20
    """Of the records of one caller's calls that wait."""
    allow_self_approval: bool = False
    url: str | None = None

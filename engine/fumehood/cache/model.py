"""What administrators see of the result cache. Values only: no key and no answer is among them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class CacheStatus(BaseModel):
    """The present content, and counters since the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    entries: int
    size_bytes: int
    max_bytes: int
    running: int
    """Runs whose answers are expected."""
    hits: int
    misses: int
    evicted: int
    """Answers that were dropped for others before they expired."""


class ClearedCache(BaseModel):
    """How many answers were dropped."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    cleared: int

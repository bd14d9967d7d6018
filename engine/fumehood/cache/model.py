"""The result cache's status for administrators, without keys and answers, and its settings."""

from __future__ import annotations

from pydantic import Field

from fumehood.core.value import Value


class CacheStatus(Value):
    """The present content, and counters since the start."""

    entries: int
    size_bytes: int
    max_bytes: int
    running: int
    """Number of calls that are running now and whose answers may be kept."""
    hits: int
    misses: int
    evicted: int
    """Answers that were dropped for others before they expired."""


class ClearedCache(Value):
    """How many answers were dropped."""

    cleared: int


class CacheSettings(Value):
    """How long answers are kept, and how much of them."""

    ttl_seconds: int = Field(default=300, ge=1, le=30 * 86_400)
    """Seconds for tools whose definition has no `cache_ttl`."""
    max_mb: int = Field(default=64, ge=0, le=1_000_000)
    """Total size of all answers; 0 disables the cache."""
    max_entry_kb: int = Field(default=1024, ge=1, le=1_000_000)

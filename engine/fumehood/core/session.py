"""Sessions as their owner sees them: a place whose files and variables live on between calls.

Values only. Which there are is kept in `sandbox/sessions`, their rows in `storage/sessions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import AwareDatetime, BaseModel, ConfigDict


class SessionStatus(StrEnum):
    """What became of a session."""

    ACTIVE = "active"
    ENDED = "ended"
    """Ended by its owner, by its lifetime, or with the engine."""
    LOST = "lost"
    """Its container went without anybody's asking, and its files and variables with it."""


class SessionRecord(BaseModel):
    """One session. `why` is one sentence, and null while it is active."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    id: str
    state: SessionStatus
    why: str | None
    image: str
    languages: tuple[str, ...]
    agent_id: str | None
    memory_mb: int
    created_at: AwareDatetime
    last_used_at: AwareDatetime
    expires_at: AwareDatetime
    """When it ends if it stays unused; never after its absolute end."""
    calls: int
    is_busy: bool
    """Whether a call is in it now, or waits for it."""


@dataclass(frozen=True, slots=True)
class KeptSession:
    """One session with what its owner knows already."""

    principal_id: str
    record: SessionRecord
    finished_at: datetime | None = None
    """When it ended or was lost."""


__all__ = ["KeptSession", "SessionRecord", "SessionStatus"]

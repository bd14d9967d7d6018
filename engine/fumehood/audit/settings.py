"""The operator's settings of the audit chain. Values only."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AuditSettings(BaseModel):
    """How often the head of the chain is anchored outside the database: whichever comes first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor_rows: int = Field(default=1000, ge=1, le=1_000_000)
    anchor_seconds: float = Field(default=300, ge=1, le=86_400)


__all__ = ["AuditSettings"]

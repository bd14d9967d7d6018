"""The operator's settings of the webhook. Values only."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class WebhookSettings(BaseModel):
    """The address that is told of approvals, and the secret that signs in both directions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://", max_length=2000)
    secret_file: Path
    """At least 32 bytes, readable by the engine's user only."""
    timeout_seconds: float = Field(default=10, gt=0, le=60)
    attempts: int = Field(default=8, ge=1, le=50)
    replay_window_seconds: float = Field(default=300, ge=10, le=3600)
    """How far the time in a callback's signature may be from the engine's clock."""
    may_decide: bool = False
    """Whether a signed callback may decide, as the approver `webhook`."""


__all__ = ["WebhookSettings"]

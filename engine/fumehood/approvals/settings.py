"""The operator's settings of approvals and of their channels. Values only."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ApprovalSettings(BaseModel):
    """How long approvers have, how many calls may wait, and what an approval permits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expire_seconds: float = Field(default=3600, ge=1, le=30 * 86_400)
    """A call that is not decided in this time expires."""
    start_within_seconds: float = Field(default=300, ge=1, le=86_400)
    """An approval that could not be used in this time expires."""
    warn_seconds: float = Field(default=300, ge=0, le=86_400)
    """How long before expiry a warning is sent."""
    max_wait_seconds: float = Field(default=600, ge=1, le=3600)
    """The longest that one call's `wait_for_approval` holds its connection."""
    max_pending: int = Field(default=10_000, ge=1, le=1_000_000)
    max_pending_per_principal: int = Field(default=1000, ge=1, le=1_000_000)
    max_pending_mb_per_principal: int = Field(default=64, ge=1, le=100_000)
    """The disk space that the records of one principal's waiting calls may take."""
    kept_days: int = Field(default=90, ge=1, le=3650)
    repeat_seconds: float = Field(default=86_400, ge=0, le=30 * 86_400)
    """How long after the call's end a repeat gets its unfetched answer."""
    allow_self_approval: bool = False
    """A principal may approve its own call, which is recorded as such."""
    url: str | None = Field(default=None, max_length=500)
    """Address of the page of one approval, with `{id}` for its id. It becomes `approval_url`."""


class WebhookSettings(BaseModel):
    """The address that is notified of approvals, and the secret that signs both directions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://", max_length=2000)
    secret_file: Path
    """A secret of at least 32 bytes, readable by the engine's user only."""
    timeout_seconds: float = Field(default=10, gt=0, le=60)
    attempts: int = Field(default=8, ge=1, le=50)
    replay_window_seconds: float = Field(default=300, ge=10, le=3600)
    """How far the time in a callback's signature may be from the engine's clock."""
    may_decide: bool = False
    """Whether a signed callback may decide, as the approver `webhook`."""

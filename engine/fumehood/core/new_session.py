"""A caller's options for a new session. Absent options have the configured values."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.call import Id
from fumehood.core.tool import Megabytes, Seconds


class NewSession(BaseModel):
    """The body of `POST /v1/sessions`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, strict=True)

    image: str | None = Field(default=None, min_length=1, max_length=64)
    agent_id: Id | None = None
    memory_mb: Megabytes | None = None
    idle_seconds: Seconds | None = None
    lifetime_seconds: Seconds | None = None

"""A caller's options for a new session. Absent options have the configured values."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.call import Id
from fumehood.core.limits import CONTAINER_MEMORY_CLASSES, MIN_CONTAINER_MB
from fumehood.core.names import IMAGE_NAME
from fumehood.core.tool import Megabytes, Seconds


class NewSession(BaseModel):
    """The body of `POST /v1/sessions`."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, strict=True)

    image: str | None = Field(
        default=None, min_length=1, max_length=64, json_schema_extra={"pattern": IMAGE_NAME}
    )
    agent_id: Id | None = None
    memory_mb: Megabytes | None = Field(
        default=None,
        description="At most `container.max_memory_mb` of the configuration.",
        json_schema_extra={"minimum": MIN_CONTAINER_MB, "maximum": CONTAINER_MEMORY_CLASSES[-1]},
    )
    idle_seconds: Seconds | None = Field(
        default=None, description="At most `sessions.idle_seconds` of the configuration."
    )
    lifetime_seconds: Seconds | None = Field(
        default=None, description="At most `sessions.lifetime_seconds` of the configuration."
    )

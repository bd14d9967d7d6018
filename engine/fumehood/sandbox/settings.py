"""The operator's settings of sessions, and the names of images. Values only."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.names import IMAGE_NAME

ImageName = Annotated[str, Field(pattern=IMAGE_NAME)]


class SessionSettings(BaseModel):
    """Defaults and ceilings of sessions, and how many there may be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: ImageName = "python-data"
    max: int = Field(default=4, ge=0, le=256)
    max_per_principal: int = Field(default=3, ge=0, le=256)
    idle_seconds: float = Field(default=1800, ge=1, le=86_400)
    """Default and ceiling, like `lifetime_seconds`."""
    lifetime_seconds: float = Field(default=14_400, ge=10, le=604_800)
    queue_seconds: float = Field(default=30, ge=0, le=600)
    """How long a call waits for earlier calls in the same session."""
    waiting: int = Field(default=20, ge=0, le=1000)
    """How many calls may wait for one session."""

    @property
    def max_of_one(self) -> int:
        """The limit for one principal, which is never above the limit for all."""
        return min(self.max_per_principal, self.max)


__all__ = ["IMAGE_NAME", "ImageName", "SessionSettings"]

"""The operator's settings of tools that are not this engine's. Values only."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.names import EXTERNAL_NAME_PATTERN
from fumehood.core.tool import Money


class ExternalToolSettings(BaseModel):
    """What the operator says of one tool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dangerous: bool = True
    description: str = Field(
        default="A tool that the caller runs itself.", min_length=1, max_length=10_000
    )
    cost_per_use: Money = Field(default=0, validate_default=True)
    rate_limit: int | None = Field(default=None, gt=0)


AllExternalTools = dict[Annotated[str, Field(pattern=EXTERNAL_NAME_PATTERN)], ExternalToolSettings]

"""Settings of the recordings of events."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fumehood.core.part import Setting

SETTINGS = {
    "streams_mb": Setting(Annotated[int, Field(ge=1, le=1_000_000)], 2048),
    "streams_kept_minutes": Setting(Annotated[float, Field(ge=0, le=24 * 60)], 15.0),
}

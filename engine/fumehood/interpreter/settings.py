"""The operator's settings of the interpreter."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fumehood.core.limits import MIN_MEMORY_MB
from fumehood.core.part import Setting
from fumehood.sandbox.settings import ProcessWallSettings


class InterpreterSettings(ProcessWallSettings):
    """Defaults and maximums for the interpreter, which runs expressions and restricted programs."""

    min_memory_mb: ClassVar[int] = MIN_MEMORY_MB

    timeout_seconds: float = Field(default=5, gt=0, le=600)
    max_timeout_seconds: float = Field(default=30, gt=0, le=600)
    memory_mb: int = Field(default=64, ge=MIN_MEMORY_MB)
    max_memory_mb: int = Field(default=256, ge=MIN_MEMORY_MB)
    output_kb: int = Field(default=64, ge=1, le=1024)


SETTINGS = {"interpreter": Setting(InterpreterSettings, InterpreterSettings())}

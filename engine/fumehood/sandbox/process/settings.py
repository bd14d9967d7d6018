"""The operator's settings of the walls that are made of processes. Values only."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.limits import MIN_INTERPRETER_MB, MIN_JAIL_MB, WallLimits


class ProcessWallSettings(BaseModel):
    """Defaults and ceilings of one wall."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_memory_mb: ClassVar[int]

    timeout_seconds: float = Field(default=30, gt=0, le=600)
    max_timeout_seconds: float = Field(default=600, gt=0, le=600)
    cpu_seconds: float | None = Field(default=None, gt=0)
    """Absent: CPU time is limited by wall time only."""
    memory_mb: int
    max_memory_mb: int
    output_kb: int = Field(default=1024, ge=1, le=1024)

    @property
    def limits(self) -> WallLimits:
        """The limits that calls behind this wall get."""
        return WallLimits(
            default_wall_s=self.timeout_seconds,
            max_wall_s=self.max_timeout_seconds,
            default_memory_mb=self.memory_mb,
            max_memory_mb=self.max_memory_mb,
            min_memory_mb=self.min_memory_mb,
            output_bytes=self.output_kb * 1024,
            cpu_s=self.cpu_seconds,
        )


class InterpreterSettings(ProcessWallSettings):
    """Defaults and ceilings of the interpreter wall."""

    min_memory_mb: ClassVar[int] = MIN_INTERPRETER_MB

    timeout_seconds: float = Field(default=5, gt=0, le=600)
    max_timeout_seconds: float = Field(default=30, gt=0, le=600)
    memory_mb: int = Field(default=64, ge=MIN_INTERPRETER_MB)
    max_memory_mb: int = Field(default=256, ge=MIN_INTERPRETER_MB)
    output_kb: int = Field(default=64, ge=1, le=1024)


class JailSettings(ProcessWallSettings):
    """Defaults and ceilings of the jail, where sandboxed functions run."""

    min_memory_mb: ClassVar[int] = MIN_JAIL_MB

    memory_mb: int = Field(default=256, ge=MIN_JAIL_MB)
    max_memory_mb: int = Field(default=2048, ge=MIN_JAIL_MB)


__all__ = ["InterpreterSettings", "JailSettings", "ProcessWallSettings"]

"""The operator's settings of circuit breakers. Values only."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CircuitSettings(BaseModel):
    """When the circuit to a service opens, and how it closes again; the same for every service.

    It opens at `min_failures` failed requests within the window, if they are at least
    `failure_rate` of all. Each failed trial doubles the time for which it is open.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window_seconds: float = Field(default=60, ge=1, le=3600)
    min_failures: int = Field(default=5, ge=1, le=100_000)
    failure_rate: float = Field(default=0.5, gt=0, le=1)
    open_seconds: float = Field(default=30, gt=0, le=3600)
    max_open_seconds: float = Field(default=300, gt=0, le=86_400)
    trials: int = Field(default=2, ge=1, le=100)
    """Requests that are let through to try it, at most at a time. It closes after as many
    successes."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.max_open_seconds < self.open_seconds:
            raise ValueError("max_open_seconds must be at least open_seconds")
        return self

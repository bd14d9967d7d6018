"""A finding of `lint`: one rule that a tool's definition breaks."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Severity(StrEnum):
    """*Source*: the levels of SARIF 2.1.0, section 3.27.10."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(BaseModel):
    """One broken rule: where, why, and the remedy. `path` is a place in the definition."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    rule: str
    severity: Severity
    path: str
    message: str
    remedy: str

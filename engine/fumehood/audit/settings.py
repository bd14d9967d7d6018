"""The operator's settings for anchors of the audit chain."""

from __future__ import annotations

from pydantic import Field

from fumehood.core.part import Setting
from fumehood.core.value import Value


class AuditSettings(Value):
    """How often the newest row of the chain is anchored outside the database: after this number of
    rows or seconds, whichever comes first.
    """

    anchor_rows: int = Field(default=1000, ge=1, le=1_000_000)
    anchor_seconds: float = Field(default=300, ge=1, le=86_400)


SETTINGS = {"audit": Setting(AuditSettings, AuditSettings())}

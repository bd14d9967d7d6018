"""The audit chain as administrators see it. Values only; what they mean is in `audit/chain`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_AUDIT_PAGE = 1000


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class AuditRecord(_Value):
    """One row: `body` is JSON text, whose very bytes the mac covers; `before` is the last row's."""

    seq: int
    key_id: str
    before: str | None
    mac: str
    body: str


class AuditQuery(_Value):
    """Which rows: those that follow row `after`."""

    after: int = Field(default=0, ge=0, lt=2**63)
    limit: int = Field(default=100, ge=1, le=MAX_AUDIT_PAGE)


class AuditFinding(_Value):
    """One place where the chain breaks."""

    seq: int
    problem: str
    message: str


class AuditVerdict(_Value):
    """What a walk along the whole chain found.

    `anchored_to` is the newest row that an anchor vouches for. Of many findings the first are
    told; `problems` counts all.
    """

    intact: bool
    rows: int
    first_seq: int | None
    last_seq: int | None
    head: str | None
    key_ids: tuple[str, ...]
    anchors: int
    anchored_to: int | None
    problems: int
    findings: tuple[AuditFinding, ...]


class AuditRotation(_Value):
    """A new key: the row that announces it is the last one under the key before."""

    seq: int
    key_id: str
    previous_key_id: str

"""The audit chain's settings, and the chain in the form that administrators see, as plain
values."""

from __future__ import annotations

from pydantic import Field

from fumehood.core.value import Value

MAX_AUDIT_PAGE = 1000
"""Maximum number of rows in one page."""


class AuditRecord(Value):
    """One row of the audit chain.

    `mac` authenticates the exact bytes of `body`, which is JSON. `before` is the previous row's
    `mac`.
    """

    seq: int
    key_id: str
    before: str | None
    mac: str
    body: str


class AuditQuery(Value):
    """A query for at most `limit` rows after row `after`."""

    after: int = Field(default=0, ge=0, lt=2**63)
    limit: int = Field(default=100, ge=1, le=MAX_AUDIT_PAGE)


class AuditFinding(Value):
    """One place at which the audit chain is not intact."""

    seq: int
    problem: str
    message: str


class AuditVerdict(Value):
    """The result of verifying the whole audit chain.

    `anchored_to` is the number of the newest row that an anchor confirms. Only the first findings
    are listed; `problems` is the number of all findings.
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


class AuditRotation(Value):
    """The change to a new key of the audit chain. Its row is the last row with the previous key."""

    seq: int
    key_id: str
    previous_key_id: str


class AuditSettings(Value):
    """How often the newest row of the chain is anchored outside the database: after this number of
    rows or seconds, whichever comes first.
    """

    anchor_rows: int = Field(default=1000, ge=1, le=1_000_000)
    anchor_seconds: float = Field(default=300, ge=1, le=86_400)

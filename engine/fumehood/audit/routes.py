"""HTTP routes of the audit chain, for administrators."""

from __future__ import annotations

from pydantic import Field

from fumehood.answers import AuditPage, AuditRotation, AuditVerdict, Pagination
from fumehood.audit.in_engine import Audit
from fumehood.core.identity import Principal
from fumehood.core.value import Value
from fumehood.engine import Engine
from fumehood.http.endpoint import Needs, endpoint

MAX_AUDIT_PAGE = 1000
"""Maximum number of rows in one page."""

VERIFY_S = 600.0
"""Seconds to verify the audit chain, enough for about ten million rows."""


class AuditQuery(Value):
    """A query for at most `limit` rows after row `after`."""

    after: int = Field(default=0, ge=0, lt=2**63)
    limit: int = Field(default=100, ge=1, le=MAX_AUDIT_PAGE)


@endpoint("GET", "/v1/audit", Needs.ADMIN, client="audit.page")
async def list_audit(engine: Engine, query: AuditQuery) -> AuditPage:
    """List the rows of the audit chain that follow row `after`, oldest first."""
    found = await engine.part(Audit).service.page(query.after, query.limit + 1)
    items = found[: query.limit]
    has_more = len(found) > query.limit
    pagination = Pagination(
        has_more=has_more, next_cursor=str(items[-1].seq) if has_more else None, total_count=None
    )
    return AuditPage(items=items, pagination=pagination)


@endpoint("GET", "/v1/audit/verify", Needs.ADMIN, work_s=VERIFY_S, client="audit.verify")
async def verify_audit(engine: Engine) -> AuditVerdict:
    """Verify the whole audit chain with the keys and anchors in the state directory."""
    return await engine.part(Audit).service.verify()


@endpoint("POST", "/v1/audit/rotate", Needs.ADMIN, client="audit.rotate")
async def rotate_audit_key(engine: Engine, caller: Principal) -> AuditRotation:
    """Continue the audit chain with a new key. The old key is kept for verification."""
    return await engine.part(Audit).service.rotate(caller)


CONTROL_OPERATIONS = [list_audit, verify_audit, rotate_audit_key]

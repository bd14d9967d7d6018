"""`/v1/audit`: the audit chain, on the control socket, for the scope `admin`."""

from __future__ import annotations

from fumehood.answers import AuditPage, Pagination
from fumehood.audit.model import AuditQuery, AuditRotation, AuditVerdict
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.endpoint import Needs, endpoint

VERIFY_S = 600.0
"""Seconds for some ten million rows."""


@endpoint("GET", "/v1/audit", Needs.ADMIN, client="audit.page")
async def list_audit(engine: Engine, query: AuditQuery) -> AuditPage:
    """List rows of the audit chain after row `after`, oldest first."""
    found = await engine.audit.page(query.after, query.limit + 1)
    items = found[: query.limit]
    has_more = len(found) > query.limit
    pagination = Pagination(
        has_more=has_more, next_cursor=str(items[-1].seq) if has_more else None, total_count=None
    )
    return AuditPage(items=items, pagination=pagination)


@endpoint("GET", "/v1/audit/verify", Needs.ADMIN, work_s=VERIFY_S, client="audit.verify")
async def verify_audit(engine: Engine) -> AuditVerdict:
    """Verify the whole chain with the keys and anchors in the state directory."""
    return await engine.audit.verify()


@endpoint("POST", "/v1/audit/rotate", Needs.ADMIN, client="audit.rotate")
async def rotate_audit_key(engine: Engine, caller: Principal) -> AuditRotation:
    """Continue the chain under a new key. The old key is kept for verification."""
    return await engine.audit.rotate(caller)


OPERATIONS = [list_audit, verify_audit, rotate_audit_key]

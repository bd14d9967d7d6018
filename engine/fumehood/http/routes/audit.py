"""`/v1/audit`: the audit chain, on the control socket, for the scope `admin`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import AuditPage, Pagination
from fumehood.audit.model import AuditQuery, AuditRotation, AuditVerdict
from fumehood.http.answers import answer, engine_of, query_of
from fumehood.http.caller import require_admin
from fumehood.http.operation import Needs, Operation


async def list_audit(request: Request) -> Response:
    """List rows of the audit chain after row `after`, oldest first."""
    await require_admin(request)
    query = query_of(AuditQuery, request)
    found = await engine_of(request).audit.page(query.after, query.limit + 1)
    items = found[: query.limit]
    has_more = len(found) > query.limit
    pagination = Pagination(
        has_more=has_more, next_cursor=str(items[-1].seq) if has_more else None, total_count=None
    )
    return answer(request, AuditPage(items=items, pagination=pagination))


async def verify_audit(request: Request) -> Response:
    """Verify the whole chain with the keys and anchors in the state directory."""
    await require_admin(request)
    return answer(request, await engine_of(request).audit.verify())


async def rotate_audit_key(request: Request) -> Response:
    """Continue the chain under a new key. The old key is kept for verification."""
    by = await require_admin(request)
    return answer(request, await engine_of(request).audit.rotate(by))


OPERATIONS = [
    Operation("GET", "/v1/audit", list_audit, Needs.ADMIN, data=AuditPage, query=AuditQuery),
    Operation("GET", "/v1/audit/verify", verify_audit, Needs.ADMIN, data=AuditVerdict),
    Operation("POST", "/v1/audit/rotate", rotate_audit_key, Needs.ADMIN, data=AuditRotation),
]

"""`GET /v1/usage`: what calls took together, the caller's own or everybody's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.budgets.usage import AllUsageQuery, UsageQuery, UsageTable
from fumehood.http.answers import answer, engine_of, query_of
from fumehood.http.caller import require_admin, require_principal
from fumehood.http.operation import Needs, Operation


async def show_usage(request: Request) -> Response:
    """What the caller's own calls took, and what the budgets that limit it have left.

    It is added up from the call log, which keeps a limited number of calls.
    """
    principal = require_principal(request)
    query = query_of(UsageQuery, request)
    return answer(request, await engine_of(request).usage_of(principal, query))


async def show_all_usage(request: Request) -> Response:
    """What everybody's calls took, and what every budget has left.

    It is added up from the call log, which keeps a limited number of calls of each principal.
    """
    await require_admin(request)
    query = query_of(AllUsageQuery, request)
    return answer(request, await engine_of(request).all_usage(query))


OPERATIONS = [
    Operation("GET", "/v1/usage", show_usage, Needs.CALLER, data=UsageTable, query=UsageQuery)
]

CONTROL_OPERATIONS = [
    Operation("GET", "/v1/usage", show_all_usage, Needs.ADMIN, data=UsageTable, query=AllUsageQuery)
]

"""`GET /v1/usage`: totals of calls, the caller's own or everybody's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.budgets.model import AllUsageQuery, UsageQuery, UsageTable
from fumehood.http.answers import answer, engine_of, query_of
from fumehood.http.caller import require_admin, require_principal
from fumehood.http.operation import Needs, Operation


async def show_usage(request: Request) -> Response:
    """Show the usage of the caller's own calls, and what is left of its budgets.

    It is summed from the call log, which keeps a limited number of calls.
    """
    principal = require_principal(request)
    query = query_of(UsageQuery, request)
    return answer(request, await engine_of(request).usage_of(principal, query))


async def show_all_usage(request: Request) -> Response:
    """Show everybody's usage, and what is left of every budget.

    It is summed from the call log, which keeps a limited number of calls of each principal.
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

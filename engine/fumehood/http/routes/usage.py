"""`GET /v1/usage`: totals of calls, the caller's own or of all principals."""

from __future__ import annotations

from fumehood.budgets.model import AllUsageQuery, UsageQuery, UsageTable
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.endpoint import Needs, endpoint


@endpoint("GET", "/v1/usage", Needs.CALLER, client="usage")
async def show_usage(engine: Engine, caller: Principal, query: UsageQuery) -> UsageTable:
    """Show the usage of the caller's own calls, and the remaining amounts of its budgets.

    It is summed from the call log, which keeps a limited number of calls.
    """
    return await engine.usage_of(caller, query)


@endpoint("GET", "/v1/usage", Needs.ADMIN, client="usage")
async def show_all_usage(engine: Engine, query: AllUsageQuery) -> UsageTable:
    """Show the usage of all principals, and the remaining amount of every budget.

    It is summed from the call log, which keeps a limited number of calls of each principal.
    """
    return await engine.all_usage(query)


OPERATIONS = [show_usage]
CONTROL_OPERATIONS = [show_all_usage]
